"""Every axis and schedule trains what one process trains when `wait()` only orders and does not block, as on NCCL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel.buckets import Bucket
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.layout import AXES
from megatron.pipeline_parallel.links import Links, Message
from megatron.pipeline_schedules import SCHEDULES
from megatron.prove.check_layout.outcome import RankOutcome, join, train_outcome
from megatron.training.assemble import Parts
from tests.cluster.unforgiving import Order, Unforgiven, order_of_operations, unforgiving
from tests.equivalence import test_context_parallel, test_moe
from tests.equivalence.test_model_parallel import EQUAL, GPT2, LLAMA, SP, layout
from tests.equivalence.test_zero import BOTH_WAYS
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.layouts import STEPS, expected, few_batches, no_deeper, worst
from tests.helpers.runs import flags, make_parts

RANKS = 4
INSTANCES = {"num_distributed_optimizer_instances": 2, "ddp_bucket_size": 8000}
OVERLAPPED = {"overlap_grad_reduce": True}
EP, PP = test_moe.EP, test_moe.PP
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GPT2, layout(tp=2, **OVERLAPPED)),
    (GPT2, layout(tp=2, **SP, **OVERLAPPED)),
    (LLAMA, layout(pp=2, pipeline_schedule="gpipe")),
    (GPT2, layout(pp=4)),
    (GPT2, layout(pp=2, num_layers_per_virtual_pipeline_stage=1, **OVERLAPPED)),
    (LLAMA, layout(tp=2, pp=2, pipeline_schedule="zero-bubble", **SP)),
    *((test_context_parallel.LLAMA, test_context_parallel.layout(2, kind)) for kind in test_context_parallel.KINDS),
    (test_moe.MIXTRAL, {EP: 2, test_moe.TP: 2, **SP}),
    (test_moe.DEEPSEEK, {EP: 2, PP: 2}),
    (GPT2, layout(tp=2, **SP, **BOTH_WAYS)),
    (GPT2, layout(pp=2, num_layers_per_virtual_pipeline_stage=1, **BOTH_WAYS)),
    (test_moe.MIXTRAL, {EP: 2, **BOTH_WAYS}),
    (GPT2, {**BOTH_WAYS, **INSTANCES}),
    (test_moe.MIXTRAL, {EP: 2, **BOTH_WAYS, **INSTANCES}),
]


def train(rank: int, ranks: int, cases: list[list[str]], change: Callable[[Parts], None] | None) -> list[RankOutcome]:
    torch.set_num_threads(1)
    found = []
    for argv in cases:
        with order_of_operations():
            _, parts = make_parts(argv, rank=rank, world_size=ranks, dtype=torch.float64)
            if change is not None:
                change(parts)
            found.append(train_outcome(parts, STEPS))
    return found


def test_every_axis_and_schedule_is_the_single_process() -> None:
    cases = [(few_batches(RANKS, no_deeper(family, axes), axes), axes) for family, axes in CASES]
    with unforgiving():
        ranks = run_ranks(RANKS, train, RANKS, [flags(**family, **axes) for family, axes in cases], None, timeout=400.0)
    wrong = {}
    for number, (family, axes) in enumerate(cases):
        difference = worst(join([rank[number] for rank in ranks]), expected(tuple(flags(**family))))
        if not difference <= EQUAL:
            wrong[str(axes)] = difference
    assert not wrong


def test_the_cases_have_every_axis_and_schedule() -> None:
    axes = [axes for _, axes in CASES]
    for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
        assert any(one.get(f"{name}_parallel_size", 1) > 1 for one in axes), name
    schedules = {one["pipeline_schedule"] for one in axes if "pipeline_schedule" in one}
    assert schedules | {"1f1b", "interleaved"} == SCHEDULES.keys()  # pp=4 and virtual stages, which have no other
    assert {one.get("cp_comm_type") for one in axes} >= set(test_context_parallel.KINDS)
    assert {"tp", "pp", "cp", "ep", "dp"} <= set(AXES)


# What the backend is like.


def rules(rank: int) -> list[str]:
    found: list[str] = []
    with order_of_operations() as order:
        ours = torch.full((4,), float(rank + 1))
        host = ours.numpy()  # memory that is read without an operation
        work = dist.all_reduce(ours, async_op=True)
        assert work is not None
        found.append(f"before wait {host[0]}")
        work.wait()
        found.append(f"after wait {host[0]}")
        torch.ones(1).add_(1)
        found.append(f"after the next operation {host[0]}")
        for mistake in MISTAKES:
            x = torch.full((4,), float(rank))
            try:
                mistake(x, rank, order)
            except Unforgiven as error:
                found.append(str(error))
            for flight in (*order.flying, *order.arriving):  # ended and forgotten, before the next mistake
                flight.waited = True
                flight.work.wait()
            for kept in (order.flying, order.arriving, order.mistakes):
                kept.clear()
    return found


def left_out(x: torch.Tensor, rank: int, order: Order) -> None:
    dist.all_reduce(x, async_op=True)
    order.end()


def read_before(x: torch.Tensor, rank: int, order: Order) -> None:
    dist.all_reduce(x, async_op=True)
    x + 1


def read_by_the_host_before(x: torch.Tensor, rank: int, order: Order) -> None:
    dist.all_reduce(x, async_op=True)
    x.sum().item()


def listed_before(x: torch.Tensor, rank: int, order: Order) -> None:
    dist.all_reduce(x, async_op=True)
    x.tolist()


def sent_on_before(x: torch.Tensor, rank: int, order: Order) -> None:
    dist.all_reduce(x, async_op=True)
    dist.broadcast(x, 0)


def used_again(x: torch.Tensor, rank: int, order: Order) -> None:
    y = torch.empty(4)
    exchanged(x, y, rank)
    x.zero_()


def changed_behind_its_back(x: torch.Tensor, rank: int, order: Order) -> None:
    memory = x.numpy()
    sending, receiving = exchanged(x, torch.empty(4), rank)
    memory[0] = 7.0
    receiving.wait()
    sending.wait()


def freed(x: torch.Tensor, rank: int, order: Order) -> None:
    exchanged(x.clone(), torch.empty(4), rank)
    x + 1


def exchanged(x: torch.Tensor, y: torch.Tensor, rank: int) -> tuple[dist.Work, dist.Work]:
    receiving = dist.irecv(y, 1 - rank)
    sending = dist.isend(x, 1 - rank)
    assert sending is not None and receiving is not None
    return sending, receiving


MISTAKES = (
    left_out,
    read_before,
    read_by_the_host_before,
    listed_before,
    sent_on_before,
    used_again,
    changed_behind_its_back,
    freed,
)


def test_a_wait_orders_and_each_mistake_has_its_name() -> None:
    with unforgiving():
        for found in run_ranks(2, rules):
            seen, said = found[:3], found[3:]
            assert seen == ["before wait nan", "after wait nan", "after the next operation 3.0"]
            assert len(said) == len(MISTAKES), said
            for mistake, text in zip(MISTAKES, said, strict=True):
                named = "exchanged" if mistake in (used_again, changed_behind_its_back, freed) else mistake.__name__
                assert f"in {named} began" in text and "wait" in text, text


# What the suite is worth: mistakes in the package itself.


def gradient_sums_not_waited_for(parts: Parts) -> None:
    start = collectives.start_all_reduce

    def without_works(tensor: torch.Tensor, axis: Axis) -> collectives.Pending:
        pending = start(tensor, axis)
        return collectives.Pending(pending.result) if axis.name == "dp_cp" else pending

    collectives.start_all_reduce = without_works


def gathered_weights_not_waited_for(parts: Parts) -> None:
    start = collectives.start_gather_in_place

    def without_works(flat: torch.Tensor, axis: Axis) -> collectives.Pending:
        return collectives.Pending(start(flat, axis).result)

    collectives.start_gather_in_place = without_works


def instances_summed_too_early(parts: Parts) -> None:
    """Sums the instances before their own sums have arrived."""

    def start(self: Bucket) -> None:
        early = collectives.start_all_reduce(self.buffer[slice(*self.chunk)], self.replicas)
        self.finish_sum()
        self.pending = early

    Bucket.start_sum_of_instances = start  # type: ignore[method-assign]


def sends_not_kept(parts: Parts) -> None:
    """Drops the reference to a stage's output while it is being sent, so that it may be freed."""

    class Forgetful(deque[Any]):
        def append(self, item: Any) -> None: ...

    def send(self: Links, tensor: torch.Tensor, message: Message, to: int) -> None:
        self._sending = Forgetful()
        original(self, tensor.clone(), message, to)

    original = Links.send
    Links.send = send  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("axes", "plant", "said"),
    [
        (
            {"micro_batch_size": 2},
            gradient_sums_not_waited_for,
            r"in row_norms: .* uses what all_reduce, which .* in without_works",
        ),
        (BOTH_WAYS, gathered_weights_not_waited_for, "uses what all_gather, which .* in without_works"),
        ({**BOTH_WAYS, **INSTANCES}, instances_summed_too_early, "all_reduce by .* uses what reduce_scatter"),
        (layout(pp=2), sends_not_kept, "a buffer of send to 1, which megatron/pipeline_parallel/links.py"),
    ],
)
def test_a_planted_mistake_is_found(axes: dict[str, Any], plant: Callable[[Parts], None], said: str) -> None:
    ranks = 2 * axes.get("num_distributed_optimizer_instances", 1)
    with unforgiving(), pytest.raises(RankFailed, match=said):
        run_ranks(ranks, train, ranks, [flags(**{**GPT2, **axes})], plant, timeout=60.0)

"""Several instances of a sharded optimizer (HSDP) train what one process with a plain optimizer trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data_parallel import FullySharded
from megatron.data_parallel.buckets import Bucket
from megatron.distributed import collectives
from megatron.training.assemble import Parts
from tests.equivalence import test_context_parallel, test_moe
from tests.equivalence.test_model_parallel import GPT2, LLAMA, ONE_GROUP, SP, layout
from tests.equivalence.test_zero import ADAM, BITS, BOTH_WAYS, EP, EQUAL, ONE, PP, SEEN, STEPS, held, train
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.layouts import Cases, at_layout, expected, shallow, unequal, worst
from tests.helpers.runs import flags, make_parts

TWO = {"num_distributed_optimizer_instances": 2}
FOUR = {"num_distributed_optimizer_instances": 4}
SEVERAL_BUCKETS = {"ddp_bucket_size": 8000}
LATE = {**BOTH_WAYS, **SEVERAL_BUCKETS}
THREE = {"zero_stage": 3}
ONE_SAMPLE = {"micro_batch_size": 1}

LONGER: Cases = shallow(
    {
        4: [
            ({**GPT2, **ADAM}, {**LATE, **TWO}),
            ({**GPT2, **ADAM}, {**THREE, **TWO}),
        ],
    }
)
FEW: Cases = shallow(
    {
        4: [
            (GPT2, {**ONE, **FOUR}),  # nothing is left to divide
            (GPT2, {"zero_stage": 2, **FOUR}),
            (LLAMA, {"zero_stage": 2, **TWO}),
            (LLAMA, layout(pp=2, pipeline_schedule="zero-bubble", **LATE, **TWO)),
            # An instance of two ranks that share their sequences, or is a part of those that do.
            (
                {**test_context_parallel.LLAMA, "optimizer": "adam"},
                test_context_parallel.layout(2, "p2p", **ONE, **TWO),
            ),
            (test_context_parallel.LLAMA, test_context_parallel.layout(4, "p2p", **ONE, **TWO)),
            (
                {**test_moe.DEEPSEEK, "optimizer": "adam"},
                {EP: 2, **ONE, **TWO},
            ),  # whose experts have no one to divide with
        ],
        8: [
            ({**ONE_GROUP, "optimizer": "adam"}, layout(tp=2, **SP, **LATE, **TWO)),
            ({**ONE_GROUP, **ONE_SAMPLE}, layout(tp=2, **THREE, **TWO)),
            (LLAMA, layout(pp=2, num_layers_per_virtual_pipeline_stage=1, zero_stage=2, **TWO)),
            ({**test_moe.MIXTRAL, "optimizer": "adam", **ONE_SAMPLE}, {EP: 2, **LATE, **TWO}),
            ({**test_moe.MIXTRAL, **ONE_SAMPLE}, {EP: 2, **THREE, **TWO}),
            ({**test_moe.DEEPSEEK, **ONE_SAMPLE}, {EP: 2, PP: 2, **ONE, **TWO}),
        ],
    }
)
CASES = {ranks: [*LONGER.get(ranks, ()), *FEW[ranks]] for ranks in (4, 8)}


@pytest.mark.parametrize("ranks", LONGER)
def test_a_longer_run_is_that_of_the_plain_optimizer(ranks: int) -> None:
    assert not unequal(ranks, LONGER[ranks], EQUAL, STEPS)


@pytest.mark.parametrize("ranks", FEW)
def test_every_layout_is_the_single_process(ranks: int) -> None:
    assert not unequal(ranks, FEW[ranks], EQUAL)


# Bits: instances add up the same numbers in the same order, so that their copies stay equal.

CHECKED = {
    **GPT2,
    "num_layers": 2,
    "optimizer": "adam",
    "train_iters": 3,
    "micro_batch_size": 2,
    "check_replicas_every": 1,
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "gradients in bf16": {"bf16": True, "grad_reduce_in_bf16": True},
    "fp16, some steps skipped": {"fp16": True, "initial_loss_scale": 2**23, "hysteresis": 1, "train_iters": 6},
    "experts": {**test_moe.MIXTRAL, "num_layers": 2, "optimizer": "adam", EP: 2},
}


def test_overlaps_change_no_bit_and_instances_stay_equal() -> None:
    each = [{**CHECKED, **precision} for precision in PRECISIONS.values()]
    commands = [flags(**settings, **way) for settings in each for way in ({**ONE, **TWO}, {**LATE, **TWO})]
    for found in run_ranks(4, train, 4, commands, timeout=300.0):
        for number, name in enumerate(PRECISIONS):
            plain, late = found[2 * number : 2 * number + 2]
            assert plain == late and plain.updates, name
            assert (plain.updates < len(plain.losses)) == ("skipped" in name), name


def test_one_rank_in_each_instance_is_plain_data_parallelism() -> None:
    commands = [flags(**BITS, **way) for way in ({}, {**ONE, **TWO}, {**BOTH_WAYS, **TWO}, {**THREE, **TWO})]
    for plain, *others in run_ranks(2, train, 2, commands, timeout=120.0):
        assert all(other == plain for other in others)


# Checkpoints know nothing of instances.


def train_and_resume(rank: int, first: list[str], others: list[list[str]]) -> list[dict[str, Tensor]]:
    """States after two steps, which are saved, and after four; and the state that each of `others` loads."""
    torch.set_num_threads(1)
    found = []
    _, parts = make_parts(first, rank=rank, world_size=4)
    with parts:
        for _ in range(2):
            parts.trainer.fit(2)
            found.append(state_of(parts))
    for argv in others:
        _, parts = make_parts(argv, rank=rank, world_size=4)
        with parts:
            found.append(state_of(parts))
            if argv is others[0]:
                parts.trainer.fit(2)
                found.append(state_of(parts))
    return found


def state_of(parts: Parts) -> dict[str, Tensor]:
    weights = {name: tensor.detach().clone() for name, tensor in parts.engine.whole_weights()}
    return {name: tensor for name, tensor in held(parts).items() if "/" in name} | weights


@pytest.mark.parametrize("saved", [{**BOTH_WAYS, **TWO}, {**THREE, **TWO}], ids=str)
def test_a_checkpoint_of_any_instances_goes_on_in_any_other(saved: dict[str, Any], tmp_path: Path) -> None:
    settings = {**BITS, "bf16": True, "train_iters": 6, "micro_batch_size": 1, "check_replicas_every": 1}
    ways: list[dict[str, Any]] = [saved, {}, ONE, {**ONE, **TWO}, {**ONE, **FOUR}, {"zero_stage": 2, **TWO}]
    first = flags(**settings, **saved, save=tmp_path, save_interval=2)
    loads = [flags(**settings, **way, load=tmp_path, ckpt_step=2) for way in ways]
    for then, later, loaded, gone_on, *others in run_ranks(4, train_and_resume, first, loads, timeout=180.0):
        for state in (loaded, *others):
            assert same(state, then)
        assert same(gone_on, later)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], tensor) for name, tensor in other.items())


# What the suite is worth.


def instances_are_not_summed(parts: Parts) -> None:
    Bucket.start_sum_of_instances = lambda self: None  # type: ignore[method-assign]
    FullySharded.reduce = lambda self: None  # type: ignore[method-assign]


def the_own_instance_is_summed_again(parts: Parts) -> None:
    """Planted bug: the wrong group."""
    shard = parts.trainer.engine.parallel.shard
    start, now = collectives.start_all_reduce, collectives.all_reduce
    collectives.start_all_reduce = lambda x, axis: start(x, shard if axis.name == "replicate" else axis)
    collectives.all_reduce = lambda x, axis, op="sum": now(x, shard if axis.name == "replicate" else axis, op)


def divided_by_the_instances(parts: Parts) -> None:
    """Planted bug: averages the sums, although the loss is already divided by all samples."""
    grads = parts.trainer.engine.store
    reduce = grads.reduce

    def divided() -> None:
        reduce()
        grads.multiply(0.5)

    grads.reduce = divided  # type: ignore[method-assign]


def norms_are_summed_over_the_instances(parts: Parts) -> None:
    """Planted bug: each element counts once in every instance."""
    engine = parts.trainer.engine
    optimizer, by_axes, everybody = engine.optimizer, engine.optimizer._by_axes, engine.parallel.dp_cp

    def wider(tensors: Any, counted: bool = True) -> Any:
        return {(everybody,): [part for parts in by_axes(tensors, counted).values() for part in parts]}

    optimizer._by_axes = wider  # type: ignore[method-assign]


def the_whole_buffer_is_summed_over_the_instances(parts: Parts) -> None:
    """Planted bug: sums as if nothing were sharded; this rank's part keeps its own instance's sum."""

    def start(self: Bucket) -> None:
        other = slice(0, self.chunk[0]) if self.chunk[0] else slice(self.chunk[1], None)
        self.finish_sum()
        self.pending = collectives.start_all_reduce(self.buffer[other], self.replicas)

    Bucket.start_sum_of_instances = start  # type: ignore[method-assign]


PLANTS: list[tuple[Callable[[Parts], None], dict[str, Any]]] = [
    *((plant, ONE) for plant in (instances_are_not_summed, the_own_instance_is_summed_again, divided_by_the_instances)),
    *((plant, THREE) for plant in (instances_are_not_summed, the_own_instance_is_summed_again)),
    (norms_are_summed_over_the_instances, ONE),
    (the_whole_buffer_is_summed_over_the_instances, ONE),
]


@pytest.mark.parametrize(("plant", "stage"), PLANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_planted_bugs_are_seen(plant: Callable[[Parts], None], stage: dict[str, Any]) -> None:
    family = {**GPT2, "num_layers": 2, "optimizer": "adam"}
    try:
        outcome = at_layout(4, flags(**family, **stage, **TWO), plant)
    except AssertionError as disagreement:  # of the ranks among each other
        assert not isinstance(disagreement, RankFailed), disagreement
        return
    assert worst(outcome, expected(tuple(flags(**family)))) > SEEN

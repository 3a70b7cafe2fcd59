"""ZeRO-1: ranks that shard the optimizer's state train what one process with a plain optimizer trains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data_parallel import BucketStore
from megatron.data_parallel.buckets import Bucket
from megatron.distributed import collectives
from megatron.training.assemble import Parts
from tests.equivalence import test_context_parallel, test_moe
from tests.equivalence.test_model_parallel import GPT2, LLAMA, NEOX, OLMO, ONE_GROUP, RECOMPUTED, SP, layout
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.layouts import (
    Cases,
    at_layout,
    at_layouts,
    expected,
    few_batches,
    no_deeper,
    shallow,
    unequal,
    whole_state,
    worst,
)
from tests.helpers.runs import Recorder, flags, make_parts

EQUAL, SEEN, STEPS = 1e-10, 1e-6, 4
ADAM = {"optimizer": "adam", "lr": 1e-3, "train_iters": STEPS}
LATE = {"overlap_grad_reduce": True}
ONE = {"zero_stage": 1}
BOTH_WAYS = {**ONE, **LATE, "overlap_param_gather": True}
DISK = {"optimizer_offload_directory": tempfile.gettempdir()}
"""Keeps the optimizer's state in an unlinked file."""
EP, PP = "expert_model_parallel_size", "pipeline_model_parallel_size"

# Two micro-batches in each, so that reductions wait for the last one.
LONGER: Cases = shallow(
    {
        2: [({**GPT2, **ADAM}, ONE)],
        4: [
            ({**GPT2, **ADAM}, layout(tp=2, **SP, **ONE, **LATE)),
            ({**GPT2, **ADAM}, layout(pp=2, **BOTH_WAYS)),
        ],
        8: [({**ONE_GROUP, **ADAM}, layout(tp=2, pp=2, num_layers_per_virtual_pipeline_stage=1, **SP, **BOTH_WAYS))],
    }
)
SIX = {"global_batch_size": 6}
FEW: Cases = shallow(
    {
        3: [({**GPT2, **SIX, "optimizer": "adam"}, {**ONE, **LATE})],
        4: [
            ({**RECOMPUTED, "optimizer": "adam"}, BOTH_WAYS),
            ({**ONE_GROUP, "optimizer": "adam"}, layout(tp=2, **ONE)),
            ({**NEOX, "optimizer": "adam"}, layout(pp=2, **ONE, **LATE)),
            ({**OLMO, "num_query_groups": 1, "optimizer": "adam"}, layout(tp=2, **SP, **ONE)),
            (LLAMA, layout(pp=2, pipeline_schedule="zero-bubble", **ONE, **LATE)),
            ({**test_context_parallel.LLAMA, "optimizer": "adam"}, test_context_parallel.layout(2, "p2p", **ONE)),
            ({**test_moe.MIXTRAL, "optimizer": "adam"}, {EP: 2, **ONE, **LATE}),
            ({**test_moe.DEEPSEEK, "optimizer": "adam"}, {EP: 2, PP: 2, **ONE}),
        ],
    }
)

CASES = {ranks: [*LONGER.get(ranks, ()), *FEW.get(ranks, ())] for ranks in (2, 3, 4, 8)}


@pytest.mark.parametrize("ranks", LONGER)
def test_a_longer_run_is_that_of_the_plain_optimizer(ranks: int) -> None:
    assert not unequal(ranks, LONGER[ranks], EQUAL, STEPS)


@pytest.mark.parametrize("ranks", FEW)
def test_every_layout_is_the_single_process(ranks: int) -> None:
    assert not unequal(ranks, FEW[ranks], EQUAL)


def test_a_state_in_a_file_is_that_of_the_plain_optimizer() -> None:
    """Gradients are not compared: torch's update scales them in the buffers; the update on flat buffers does not."""
    family, axes = {**GPT2, **ADAM, "num_layers": 2}, (layout(tp=2, **ONE, **DISK), layout(pp=2, **DISK))
    wanted = expected(tuple(flags(**family)), STEPS)
    for outcome in at_layouts(4, [flags(**family, **each) for each in axes], STEPS):
        assert worst(replace(outcome, gradients=wanted.gradients), wanted) <= EQUAL


# Bits: a sum of two ranks has one order, and without clipping nothing depends on a sum over the pieces.

BITS = {**GPT2, "num_layers": 2, "optimizer": "adam", "clip_grad": 0, "train_iters": 4, "micro_batch_size": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, torch's update": {"kernels": "ref"},
    "fp32, in a file": DISK,
    "bf16": {"bf16": True},
    "bf16, in a file": {"bf16": True, **DISK},
    "bf16, remainders": {"bf16": True, "store_param_remainders": True},
    "gradients in bf16": {"bf16": True, "grad_reduce_in_bf16": True},
    "gradients in bf16, torch's update": {"bf16": True, "grad_reduce_in_bf16": True, "kernels": "ref"},
    "fp16, some steps skipped": {"fp16": True, "initial_loss_scale": 2**23, "hysteresis": 1, "train_iters": 6},
    "sgd": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion", "bf16": True},
    "moments of 8 bits": {"optimizer": "adam8bit", "bf16": True},
    "experts": {**test_moe.MIXTRAL, "num_layers": 2, "optimizer": "adam"},
}


@dataclass
class Trained:
    losses: list[float]
    updates: int
    held: dict[str, Tensor]
    """Weights, and the whole state of the optimizer."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trained) and self.held.keys() == other.held.keys() and self.held
        same = all(torch.equal(tensor, other.held[name]) for name, tensor in self.held.items())
        return same and (self.losses, self.updates) == (other.losses, other.updates)


def train(rank: int, ranks: int, commands: list[list[str]]) -> list[Trained]:
    torch.set_num_threads(1)
    found = []
    for argv in commands:
        records: list[dict[str, Any]] = []
        _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
        with parts:
            parts.trainer.fit()
        updates = parts.trainer.engine.optimizer.extra_state()["step"]
        found.append(Trained([record["lm_loss"] for record in records], updates, held(parts)))
    return found


def held(parts: Parts) -> dict[str, Tensor]:
    state = whole_state(parts.trainer.engine.optimizer)
    found = {f"{name}/{kind}": tensor.clone() for name, kinds in state.items() for kind, tensor in kinds.items()}
    return found | {name: p.detach().clone() for name, p in parts.engine.model.named_parameters()}


def test_the_stages_are_equal_bit_for_bit() -> None:
    commands = [
        flags(**{**BITS, "train_iters": 3, **precision, **stage})
        for precision in PRECISIONS.values()
        for stage in ({}, ONE, BOTH_WAYS)
    ]
    first, second = run_ranks(2, train, 2, commands, timeout=300.0)
    names = list(PRECISIONS)
    for number, name in enumerate(PRECISIONS):
        plain, divided, late = first[3 * number : 3 * number + 3]
        assert plain == divided and plain == late, name
        assert second[3 * number + 1] == plain, name
        assert plain.updates, name
        assert (plain.updates < len(plain.losses)) == ("skipped" in name), plain.updates
        if name.endswith("in a file"):
            assert plain == first[3 * names.index(name.partition(",")[0])], name


def load(rank: int, ranks: int, argv: list[str]) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=ranks)
    with parts:
        return held(parts)


def test_a_checkpoint_of_each_stage_goes_on_in_the_other(tmp_path: Path) -> None:
    """0 -> 1 and 1 -> 0 resume exactly; other numbers of ranks load the same state."""
    settings = {**BITS, "bf16": True}
    saves = [
        {**settings, **stage, "save": tmp_path / str(n), "save_interval": 2} for n, stage in enumerate(({}, BOTH_WAYS))
    ]
    loads = [{**settings, **stage, "load": tmp_path / str(n), "ckpt_step": 2} for n, stage in enumerate((ONE, {}))]
    for ran in run_ranks(2, train, 2, [flags(**each) for each in (*saves, *loads)], timeout=300.0):
        whole, divided, from_whole, from_divided = ran
        assert whole == divided and whole.held.keys() == from_divided.held.keys()
        for resumed in (from_whole, from_divided):
            assert resumed.losses == whole.losses[2:] and resumed.held.keys() == whole.held.keys()
            assert all(torch.equal(tensor, resumed.held[name]) for name, tensor in whole.held.items())
    last = {**settings, "train_iters": 4, "load": tmp_path / "1"}
    (alone,) = run_ranks(1, load, 1, flags(**last))
    assert alone.keys() == whole.held.keys() and all(torch.equal(alone[name], whole.held[name]) for name in alone)
    for everywhere in run_ranks(4, load, 4, flags(**last, **ONE)):
        assert all(torch.equal(everywhere[name], whole.held[name]) for name in alone)


# What the suite is worth.


def weights_not_gathered(parts: Parts) -> None:
    parts.trainer.engine.store.publish = lambda: None  # type: ignore[method-assign]


def another_rank_s_chunk_is_summed(parts: Parts) -> None:
    """The right sums end up in another rank's chunk."""

    def start(self: Bucket, lacks: bool = False) -> None:
        self.launched = True
        self.pending = collectives.start_scatter_sum_in_place(self.buffer.roll(self.buffer.numel() // 2), self.axis)

    Bucket.start_sum = start  # type: ignore[method-assign]


def a_piece_is_updated_twice(parts: Parts) -> None:
    optimizer = parts.trainer.engine.optimizer
    groups = optimizer._update._groups
    rule, names = next(iter(groups.items()))
    groups[rule] = [*names, names[0]]


def elements_are_counted_by_all(parts: Parts) -> None:
    """Each rank takes its pieces for the whole, so their norm is summed over the ranks."""
    optimizer = parts.trainer.engine.optimizer
    by_axes = optimizer._by_axes

    def doubled(tensors: Any, counted: bool = True) -> Any:
        return {axes: [*some, *some] for axes, some in by_axes(tensors, counted).items()}

    optimizer._by_axes = doubled  # type: ignore[method-assign]


def a_tied_table_among_others(parts: Parts) -> None:
    """The pieces of the tied embedding differ between the first and the last stage."""
    engine = parts.trainer.engine
    sums = engine.sum_replicas

    def shifted(grads: BucketStore) -> None:
        name = "embedding.word_embeddings.weight"
        if engine.parallel.pp.rank:
            grads.grad(name).copy_(grads.grad(name).roll(1))
        sums(grads)

    engine.sum_replicas = shifted  # type: ignore[assignment]


BUGS: list[tuple[Callable[[Parts], None], int, dict[str, Any]]] = [
    (weights_not_gathered, 2, {}),
    (another_rank_s_chunk_is_summed, 2, {}),
    (a_piece_is_updated_twice, 2, {}),
    (elements_are_counted_by_all, 2, {}),
    (a_tied_table_among_others, 4, layout(pp=2)),
]


@pytest.mark.parametrize(("bug", "ranks", "axes"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bugs_are_seen(bug: Callable[[Parts], None], ranks: int, axes: dict[str, Any]) -> None:
    family = few_batches(ranks, no_deeper({**GPT2, "optimizer": "adam"}, axes), axes)
    try:
        outcome = at_layout(ranks, flags(**family, **axes, **ONE), bug)
    except AssertionError as disagreement:  # of the ranks among each other
        assert not isinstance(disagreement, RankFailed), disagreement  # a bug that crashes or hangs proves nothing
        return
    assert worst(outcome, expected(tuple(flags(**family)))) > SEEN

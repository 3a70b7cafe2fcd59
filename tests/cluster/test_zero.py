"""Elements that the data-parallel ranks send in one step at each stage of ZeRO, counted at the process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron.config import parse_args
from megatron.data_parallel import FullySharded, Unit
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.prove.order.cluster import record_clusters
from megatron.prove.order.events import Mark, Op, Recording
from megatron.prove.order.record import FIRST_STEP, LATER
from megatron.prove.order.recorder import recorded
from tests.helpers.runs import LLAMA_SHAPE, flags, pretrain_gpt

RANKS = 4
LAYER = 32 * 32 * 4 + 3 * 32 * 128 + 2 * 32  # attention, gated MLP, norms
TABLE = 96 * 32  # every size divides by the ranks
EMBEDDING, LAYERS, HEAD = TABLE, 2 * LAYER, TABLE + 32
PARAMETERS = EMBEDDING + LAYERS + HEAD
PADDED = -(-PARAMETERS // (64 * RANKS)) * 64 * RANKS / PARAMETERS  # chunks of stage 1 are whole vectors


PADDED_WITHIN = -(-PARAMETERS // (64 * (RANKS // 2))) * 64 * (RANKS // 2) / PARAMETERS
INSTANCES = {"num_distributed_optimizer_instances": 2}
WITHIN = RANKS // 2
"""Ranks of an instance. Instances sum only the part that a rank updates."""


def sent_in_a_step(**settings: Any) -> float:
    """Elements that the data-parallel ranks send, in units of a reduce-scatter of all gradients. An all-reduce is two
    units: a reduce-scatter, and an all-gather of its result."""
    torch.set_num_threads(1)
    argv = flags(**LLAMA_SHAPE, ffn_hidden_size=128, vocab_size=96, micro_batch_size=1, kernels="ref", **settings)
    recording = record_clusters({"a run": parse_args(argv)}, RANKS, pretrain_gpt())["a run"].programs[0]
    return sum(units(op, recording) for op in first_step(recording)) / PARAMETERS


def first_step(recording: Recording) -> list[Op]:
    names = [event.name if isinstance(event, Mark) else None for event in recording.events]
    begin, end = names.index(FIRST_STEP), names.index(LATER)
    return [event for event in recording.events[begin:end] if isinstance(event, Op)]


def units(op: Op, recording: Recording) -> int:
    """Leaves out single numbers: the loss, the norm."""
    if op.size < 32:
        return 0
    ranks = len(recording.groups[op.group].ranks)
    assert ranks in (RANKS, WITHIN)
    return {"all_reduce": 2 * op.size, "reduce_scatter": op.size, "all_gather": ranks * op.size}[op.kind]


@pytest.mark.parametrize(
    ("settings", "micro_batches", "expected"),
    [
        ({"zero_stage": 0}, 1, 2.0),
        ({"zero_stage": 0}, 3, 2.0),
        ({"zero_stage": 1}, 1, 2.0 * PADDED),
        ({"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True}, 3, 2.0 * PADDED),
        ({"zero_stage": 2}, 1, 2.0),
        ({"zero_stage": 2}, 3, 1.0 + 3.0),  # gathered once, reduced for every micro-batch
        # A layer is gathered for its forward and for its backward pass. The head stays from one to the other, and the
        # backward pass of the embedding needs no weights.
        ({"zero_stage": 3}, 1, 2.0 + LAYERS / PARAMETERS),
        ({"zero_stage": 3}, 3, 3 * (2.0 + LAYERS / PARAMETERS)),
        # Between instances once a step, whatever the micro-batches.
        ({"zero_stage": 1, **INSTANCES}, 3, (2.0 + 2.0 / WITHIN) * PADDED_WITHIN),
        ({"zero_stage": 3, **INSTANCES}, 3, 3 * (2.0 + LAYERS / PARAMETERS) + 2.0 / WITHIN),
    ],
)
def test_what_a_step_sends(settings: Mapping[str, Any], micro_batches: int, expected: float) -> None:
    assert sent_in_a_step(**settings, global_batch_size=RANKS * micro_batches) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("keep_gathered", [True, False])
def test_what_fully_shard_sends_is_in_the_log_of_its_axis(keep_gathered: bool) -> None:
    """The heartbeat reads this log to name a rank that hangs in such a collective."""
    with recorded(1, RANKS) as tape:
        parallel = ParallelState.build(Layout(RANKS, tp=2), 1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        units = [Unit(model[0], parallel.dp), Unit(model, parallel.dp)]
        divided = FullySharded(units, keep_gathered=keep_gathered, device=torch.device("cpu"))
        divided.zero()
        model(torch.ones(2, 4)).sum().backward()
        sent = [op.kind for op in tape.recording.ops if tape.recording.groups[op.group].what == "dp"]
    assert sent.count("reduce_scatter") == 2 and sent.count("all_gather") >= 2
    assert [operation.name for operation in parallel.comm_log.recent["dp"]] == sent

"""Elements that a rank counts in a norm (Shard, Buffer): all ranks together count each once, and no padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.data_parallel.buckets import GradientSlot, make_buckets
from megatron.distributed.parallel_state import Axis
from megatron.state import shard
from megatron.state.division import Division, Members
from megatron.state.shard import Shard, copied_parts, counted_parts
from megatron.state.store import Buffer

WIDTH = 5
# By tensor-parallel rank: (what it holds, what of it an earlier rank holds too, rows as stored).
PARTS = {
    "a vocabulary with padding rows": (11, [(((0, 8),), (), 8), (((8, 11),), (), 8)]),
    "heads on two ranks each": (
        6,
        [(((0, 3),), (), 3), (((0, 3),), ((0, 3),), 3), (((3, 6),), (), 3), (((3, 6),), ((3, 6),), 3)],
    ),
    "ranges that overlap in part": (10, [(((0, 4), (6, 8)), (), 6), (((2, 6), (8, 10)), ((2, 4),), 6)]),
}


def held_by_ranks(case: str, zero: int) -> Iterator[tuple[Shard, Tensor]]:
    """Shard and tensor of each rank: elements hold their number, padding holds NaN."""
    rows, parts = PARTS[case]
    whole = torch.arange(1.0, rows * WIDTH + 1).view(rows, WIDTH)
    for ranges, copies, stored in parts:
        spec = Shard(case, (rows, WIDTH), ranges=ranges, copies=copies, stored=(stored, WIDTH))
        local = torch.full((stored, WIDTH), torch.nan)
        local[: spec.local_shape[0]] = spec.take(whole)
        if not zero:
            yield spec, local
            continue
        share = -(-(local.numel() + 7) // zero)
        for rank in range(zero):
            division = Division(Members("dp", rank, zero), local.numel(), share, offset=7)
            yield replace(spec, division=division), local.view(-1)[slice(*division.held)]


def wrongly_counted(case: str, zero: int) -> str | None:
    rows, _ = PARTS[case]
    found, copies, stored = [], [], 0
    for spec, tensor in held_by_ranks(case, zero):
        found += [part.reshape(-1) for part in counted_parts(spec, tensor)]
        copies += [part.reshape(-1) for part in copied_parts(spec, tensor)]
        stored += int((~tensor.isnan()).sum())
    counted = torch.cat(found).sort().values
    if not torch.equal(counted, torch.arange(1.0, rows * WIDTH + 1)):
        return f"counted are {counted.tolist()}"
    return None if counted.numel() + sum(copy.numel() for copy in copies) == stored else "copies are not all there"


@pytest.mark.parametrize("zero", [0, 2, 3, 5])
@pytest.mark.parametrize("case", PARTS)
def test_every_element_is_counted_once(case: str, zero: int) -> None:
    assert wrongly_counted(case, zero) is None


@pytest.mark.parametrize("zero", [0, 3])
def test_planted_bug_a_copy_counted_twice(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "without", lambda held, removed: iter([held]))
    assert wrongly_counted("heads on two ranks each", zero) is not None


def test_planted_bug_padding_rows_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_parts", lambda spec, tensor, which: [tensor])
    assert wrongly_counted("a vocabulary with padding rows", 3) is not None


def padding_in_runs(ranks: int) -> bool:
    """Returns whether the parts that ranks update of a sharded buffer exceed its parameters' elements."""
    elements = 0
    for rank in range(ranks):
        dp = Axis("dp", rank, ranks, tuple(range(ranks)))
        slot = GradientSlot(
            "p", nn.Parameter(torch.ones(7, 11)), dp, Axis.single("replicate"), torch.float32, shown=True
        )
        (bucket,) = make_buckets([slot], size=1, divided=True)
        bucket.buffer.fill_(torch.nan)
        bucket.views["p"].fill_(1.0)
        elements += bucket.own.numel()
        if bucket.own.isnan().any():
            return True
    return elements != 77


def test_planted_bug_a_chunks_padding_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not padding_in_runs(2)
    monkeypatch.setattr(Buffer, "held", property(lambda buffer: buffer.chunk))
    assert padding_in_runs(2)

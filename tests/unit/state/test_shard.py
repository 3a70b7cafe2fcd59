"""Splits, joins and moves to another split the layouts of our weights."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.state import shard
from megatron.state.division import even_ranges
from megatron.state.shard import Shard, copy_common, is_whole, missing_ranges, pieces

GROUPS, PER_GROUP, WIDTH, HIDDEN, FFN, VOCAB = 4, 3, 2, 5, 8, 11

LAYOUTS = {
    "qkv": ((GROUPS, PER_GROUP + 2, WIDTH, HIDDEN), 0, (GROUPS * (PER_GROUP + 2) * WIDTH, HIDDEN)),
    "qkv_bias": ((GROUPS, PER_GROUP + 2, WIDTH), 0, (GROUPS * (PER_GROUP + 2) * WIDTH,)),
    "gated": ((2, FFN, HIDDEN), 1, (2 * FFN, HIDDEN)),
    "dense": ((HIDDEN, GROUPS * PER_GROUP, WIDTH), 1, (HIDDEN, GROUPS * PER_GROUP * WIDTH)),
    "row": ((HIDDEN, FFN), 1, (HIDDEN, FFN)),
}


def split(name: str, parts: int) -> list[Shard]:
    logical, dim, _ = LAYOUTS[name]
    return [Shard(name, logical, dim, even_ranges(logical[dim], parts, rank)) for rank in range(parts)]


def stored_parts(name: str, full: torch.Tensor, parts: int) -> list[tuple[Shard, torch.Tensor]]:
    """Parts as a run would hold them: contiguous, 2-D or 1-D."""
    result = []
    for spec in split(name, parts):
        local = spec.take(full).contiguous()
        rows = local.shape[0] if spec.dim == 1 and name != "gated" else None
        shape = (-1,) if full.dim() == 1 else (rows or -1, local.numel() // rows if rows else full.shape[1])
        result.append((spec, local.reshape(shape).clone()))
    return result


def numbered(name: str) -> torch.Tensor:
    shape = LAYOUTS[name][2]
    return torch.arange(prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_put_together_are_the_whole(name: str, parts: int) -> None:
    full = numbered(name)
    joined = torch.full_like(full, -1.0)
    for spec, local in stored_parts(name, full, parts):
        assert spec.view(local).shape == spec.local_shape
        spec.put(joined, local)
    assert torch.equal(joined, full)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 4), (3, 4), (4, 3)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_moving_between_splits_never_builds_the_whole(name: str, before: int, after: int) -> None:
    full = numbered(name)
    sources, targets = stored_parts(name, full, before), stored_parts(name, full, after)
    for target, expected in targets:
        into = torch.full_like(expected, -1.0)
        copied = sum(copy_common(source, stored, target, into) for source, stored in sources)
        assert copied == expected.numel()
        assert torch.equal(into, expected)


def test_gate_and_up_are_split_inside_each_half() -> None:
    """Megatron's ranks hold [gate_r ; up_r], not the r-th rows of [gate ; up]."""
    full = numbered("gated")
    gate, up = full[:FFN], full[FFN:]
    for rank, spec in enumerate(split("gated", 2)):
        rows = slice(rank * FFN // 2, (rank + 1) * FFN // 2)
        assert torch.equal(spec.take(full).reshape(-1, HIDDEN), torch.cat([gate[rows], up[rows]]))


def test_qkv_parts_are_contiguous_rows() -> None:
    full = numbered("qkv")
    rows = full.shape[0] // 4
    for rank, spec in enumerate(split("qkv", 4)):
        assert torch.equal(spec.take(full).reshape(rows, HIDDEN), full[rank * rows : (rank + 1) * rows])


def test_fewer_kv_heads_than_ranks() -> None:
    """One KV group on two ranks: each has half of its queries and a copy of its key and value head."""
    queries, width = 4, 2
    full = torch.arange((queries + 2) * width * HIDDEN, dtype=torch.float32).view(-1, HIDDEN)
    shape = (queries + 2, width, HIDDEN)
    specs = [Shard("qkv", shape, 0, ((r * 2, r * 2 + 2), (queries, queries + 2)), ("tp",)) for r in range(2)]
    heads = full.view(shape)
    assert torch.equal(specs[1].take(full), torch.cat([heads[2:4], heads[4:6]]))
    assert missing_ranges(specs) == []
    joined = torch.full_like(full, -1.0)
    for spec in specs:
        spec.put(joined, spec.take(full).clone())
    assert torch.equal(joined, full)


@pytest.mark.parametrize(("parts", "rows"), [(1, 16), (2, 8), (4, 4)])
def test_vocabulary_padding_is_cut(parts: int, rows: int) -> None:
    """11 words in 16 rows: the last rank holds fewer words than rows, or none."""
    full = torch.arange(VOCAB * HIDDEN, dtype=torch.float32).view(VOCAB, HIDDEN)
    joined = torch.full_like(full, -1.0)
    for rank in range(parts):
        held = (min(rank * rows, VOCAB), min((rank + 1) * rows, VOCAB))
        spec = Shard("embedding", (VOCAB, HIDDEN), 0, (held,))
        stored = torch.full((rows, HIDDEN), -7.0)
        spec.view(stored).copy_(spec.take(full))
        assert (stored[held[1] - held[0] :] == -7.0).all(), "padding rows were written"
        spec.put(joined, stored)
    assert torch.equal(joined, full)


def test_view_shares_memory_and_refuses_what_does_not_fit() -> None:
    spec = Shard("w", (4, 3), 0, ((0, 2),))
    stored = torch.zeros(2, 3)
    spec.view(stored)[1, 2] = 5.0
    assert stored[1, 2] == 5.0
    for wrong in (torch.zeros(1, 3), torch.zeros(2, 4), torch.zeros(3, 4)):
        with pytest.raises(AssertionError, match="cannot contain"):
            spec.view(wrong)


def test_whole_parts() -> None:
    spec = Shard("w", (4, 3), 1)
    assert is_whole(spec) and spec.held == ((0, 3),) and spec.local_shape == (4, 3)
    assert is_whole(Shard("w", (4, 3), 0, ((0, 2), (2, 4))))
    assert not is_whole(Shard("w", (4, 3), 0, ((2, 4), (0, 2)))), "reordered is not the whole"
    assert Shard("w", (4, 3), 0, ()).local_shape == (0, 3)
    scalar = Shard("s", ())
    assert is_whole(scalar) and scalar.view(torch.tensor(2.0)) == 2.0 and scalar.take(torch.tensor(3.0)) == 3.0


def test_a_whole_copy_fills_a_split_along_another_dimension() -> None:
    full = torch.arange(12.0).view(4, 3)
    source, target = Shard("w", (4, 3), 0), Shard("w", (4, 3), 1, ((1, 3),))
    into = torch.zeros(4, 2)
    assert copy_common(source, full, target, into) == 8
    assert torch.equal(into, full[:, 1:])


def test_bad_specs_are_our_own_mistakes() -> None:
    for bad in ({"ranges": ((0, 5),)}, {"ranges": ((0, 2), (1, 3))}, {"dim": 2}, {"ranges": ((3, 2),)}):
        with pytest.raises(AssertionError, match="w:"):
            Shard("w", (4, 3), **bad)
    with pytest.raises(AssertionError, match="two dim"):
        list(pieces(Shard("w", (4, 4), 0, ((0, 2),)), Shard("w", (4, 4), 1, ((0, 2),))))


def test_missing_ranges() -> None:
    def part(*ranges: tuple[int, int]) -> Shard:
        return Shard("w", (10, 2), 0, ranges)

    assert missing_ranges([part((0, 4)), part((6, 10))]) == [(4, 6)]
    assert missing_ranges([part((2, 4)), part((3, 9))]) == [(0, 2), (9, 10)]
    assert missing_ranges([part((0, 4)), part((4, 10))]) == []
    assert missing_ranges([part((0, 4))], wanted=part((1, 3))) == []
    assert missing_ranges([part((0, 4))], wanted=part((3, 6))) == [(4, 6)]
    assert missing_ranges([Shard("w", (10, 2), 1)]) == []
    assert missing_ranges([part()]) == [(0, 10)]


@settings(deadline=None)
@given(st.data())
def test_any_two_splits_agree_with_indexing(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))

    def spec() -> Shard:
        cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=0, max_size=6)))
        ranges = tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
        order = data.draw(st.permutations(ranges)) if ranges else ()
        return Shard("w", (3, size), 1, tuple(order))

    full = torch.arange(3.0 * size).view(3, size)
    source, target = spec(), spec()
    into = torch.full(target.local_shape, -1.0)
    copy_common(source, source.take(full).clone(), target, into)
    has = {i for start, stop in source.held for i in range(start, stop)}
    wants = [i for start, stop in target.held for i in range(start, stop)]
    for column, index in enumerate(wants):
        expected = full[:, index] if index in has else torch.full((3,), -1.0)
        assert torch.equal(into[:, column], expected)
    lacking = {i for start, stop in missing_ranges([source], wanted=target) for i in range(start, stop)}
    assert lacking == set(wants) - has


def test_planted_bug_dim_of_the_gated_split_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting [gate ; up] by plain rows still reassembles, but rank 0 would hold the whole gate."""
    monkeypatch.setitem(LAYOUTS, "gated", ((2 * FFN, HIDDEN), 0, (2 * FFN, HIDDEN)))
    with pytest.raises(AssertionError):
        test_gate_and_up_are_split_inside_each_half()


def test_planted_bug_lost_offset_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_with_offsets", lambda ranges: ((0, each) for each in ranges))
    with pytest.raises(AssertionError):
        test_fewer_kv_heads_than_ranks()

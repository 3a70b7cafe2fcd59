"""Rank arithmetic against the literal formulas, and rejected layouts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.layout import AXES, Layout, nearest_divisors, nearest_multiples, padded_vocab_size


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    ep = draw(st.sampled_from([d for d in range(1, cp * dp + 1) if (cp * dp) % d == 0]))
    instances = draw(st.sampled_from([d for d in range(1, cp * dp + 1) if (cp * dp // ep) % d == 0]))
    return Layout(tp * cp * dp * pp, tp=tp, cp=cp, ep=ep, pp=pp, instances=instances)


@settings(deadline=None)
@given(layouts())
def test_every_rank_is_in_exactly_one_group_of_each_axis(layout: Layout) -> None:
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world_size))
        if axis != "embedding":  # middle stages form groups of one
            assert len({len(ranks) for ranks in groups}) == 1
        assert all(list(ranks) == sorted(ranks) for ranks in groups)
        assert layout.size(axis) == len(groups[0])


@settings(deadline=None)
@given(layouts())
def test_sizes_of_the_axes(layout: Layout) -> None:
    expected = {
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "dp": layout.dp,
        "pp": layout.pp,
        "dp_cp": layout.dp * layout.cp,
        "expert_dp": layout.dp * layout.cp // layout.ep,
        "shard": layout.dp * layout.cp // layout.instances,
        "expert_shard": layout.dp * layout.cp // layout.ep // layout.instances,
        "replicate": layout.instances,
        "embedding": min(layout.pp, 2),
        "model": layout.tp * layout.pp,
        "world": layout.world_size,
    }
    assert {axis: layout.size(axis) for axis in AXES} == expected


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_position_in_a_group_is_the_coordinate(layout: Layout) -> None:
    for axis in ("tp", "cp", "ep", "dp", "pp", "expert_dp"):
        for ranks in layout.groups(axis):
            assert layout.group_of(axis, ranks[-1]) == ranks
            for position, rank in enumerate(ranks):
                assert getattr(layout.coordinates(rank), axis) == position


@settings(deadline=None, max_examples=30)
@given(layouts())
def test_instances_are_runs_of_neighbours_as_in_megatron(layout: Layout) -> None:
    """Megatron cuts a gradient group of n ranks, dense or of experts, into slices of n / instances. Ranks at the same
    place of the slices hold the same share."""
    for whole, part in (("dp_cp", "shard"), ("expert_dp", "expert_shard")):
        for ranks in layout.groups(whole):
            size = len(ranks) // layout.instances
            slices = [ranks[start : start + size] for start in range(0, len(ranks), size)]
            assert all(layout.group_of(part, some[0]) == some for some in slices)
            for alike in zip(*slices, strict=True):
                assert layout.group_of("replicate", alike[-1]) == alike


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_two_ranks_share_at_most_one_basic_axis(layout: Layout) -> None:
    for a, b in (("tp", "cp"), ("tp", "dp"), ("tp", "pp"), ("cp", "dp"), ("cp", "pp"), ("dp", "pp"), ("ep", "tp")):
        for one in layout.groups(a):
            assert all(len(set(one) & set(other)) <= 1 for other in layout.groups(b))


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 1, 1), (2, 2, 2), (2, 3, 4), (4, 2, 1), (1, 5, 2), (8, 1, 3)])
def test_megatrons_formulas(tp: int, dp: int, pp: int) -> None:
    layout = Layout(tp * dp * pp, tp=tp, pp=pp)
    for r in range(layout.world_size):
        place = layout.coordinates(r)
        assert (place.tp, place.dp, place.pp) == (r % tp, (r // tp) % dp, r // (tp * dp))


def test_groups_written_out() -> None:
    layout = Layout(16, tp=2, cp=2, pp=2, ep=2)
    assert layout.groups("tp") == tuple((r, r + 1) for r in range(0, 16, 2))
    assert layout.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert layout.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert layout.groups("pp") == tuple((r, r + 8) for r in range(8))
    assert layout.groups("dp_cp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert layout.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert layout.groups("expert_dp") == layout.groups("dp")
    assert layout.groups("model") == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert layout.groups("world") == (tuple(range(16)),)


def test_groups_of_instances_written_out() -> None:
    layout = Layout(16, tp=2, cp=2, ep=2, instances=2)
    assert layout.groups("shard") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert layout.groups("expert_shard") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert layout.groups("replicate") == tuple((r, r + 8) for r in range(8))


def test_the_first_and_the_last_stage_share_the_embedding() -> None:
    layout = Layout(8, tp=2, pp=4)
    assert layout.groups("embedding") == ((0, 6), (1, 7), (2,), (3,), (4,), (5,))
    assert Layout(4, pp=2).groups("embedding") == Layout(4, pp=2).groups("pp")


def test_expert_groups_cross_context_and_data_parallel() -> None:
    layout = Layout(8, tp=1, cp=2, ep=4)
    assert layout.dp == 4
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.groups("expert_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"world_size": 4, "tp": 3},
            ["--tensor-model-parallel-size 3", "processes, 4, is not", "start 3 or 6", "2 or 4"],
        ),
        ({"world_size": 1, "tp": 2}, ["--tensor-model-parallel-size 2", "processes, 1, is not", "start 2", "size 1"]),
        (
            {"world_size": 8, "tp": 2, "pp": 3},
            [
                "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 3 = 6",
                "start 6 or 12 processes",
                "use --pipeline-model-parallel-size 2 or 4",
            ],
        ),
        ({"world_size": 4, "cp": 8}, ["--context-parallel-size 8", "start 8", "--context-parallel-size 4"]),
        ({"world_size": 6, "ep": 4}, ["--expert-model-parallel-size 4", "--context-parallel-size 1", "3 or 6"]),
        (
            {"world_size": 6, "instances": 4},
            ["--num-distributed-optimizer-instances 4", "ranks that shard", "6 (data parallel 6)", "3 or 6"],
        ),
        (
            {"world_size": 8, "ep": 2, "instances": 8},
            ["the same experts, 4 (data parallel 8 / --expert-model-parallel-size 2)", "instances 4"],
        ),
        ({"world_size": 4, "instances": 0}, ["--num-distributed-optimizer-instances 0"]),
        ({"world_size": 4, "tp": 0}, ["--tensor-model-parallel-size 0"]),
        ({"world_size": 4, "pp": -1}, ["--pipeline-model-parallel-size -1"]),
        ({"world_size": 0}, ["world size 0"]),
    ],
)
def test_refusals_name_the_flags_and_what_would_work(sizes: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Layout(**sizes)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16), st.integers(1, 16), st.integers(1, 16))
def test_a_layout_is_exact_or_refused(world: int, tp: int, cp: int, pp: int, ep: int) -> None:
    try:
        layout = Layout(world, tp=tp, cp=cp, pp=pp, ep=ep)
    except ConfigError:
        assert world % (tp * cp * pp) or (world // (tp * pp)) % ep
    else:
        assert layout.tp * layout.cp * layout.pp * layout.dp == world
        assert layout.ep * layout.expert_dp == layout.cp * layout.dp


def test_unknown_axis_and_rank() -> None:
    with pytest.raises(ValueError, match="unknown axis 'xp'"):
        Layout(2).groups("xp")
    with pytest.raises(ValueError, match="rank 2"):
        Layout(2).coordinates(2)


@pytest.mark.parametrize(("tp", "rows"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200), (16, 51200)])
def test_padded_vocab_of_gpt2(tp: int, rows: int) -> None:
    assert padded_vocab_size(50257, 128, tp) == rows


@settings(deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 512), st.integers(1, 16))
def test_padded_vocab_is_the_smallest_multiple(vocab: int, unit: int, tp: int) -> None:
    rows = padded_vocab_size(vocab, unit, tp)
    assert rows >= vocab and rows % (unit * tp) == 0 and rows - unit * tp < vocab


@pytest.mark.parametrize(("args", "word"), [((0, 1, 1), "vocabulary"), ((5, 0, 1), "divisible-by 0"), ((5, 1, 0), "0")])
def test_padded_vocab_refusals(args: tuple[int, int, int], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        padded_vocab_size(*args)


def test_nearest() -> None:
    assert nearest_divisors(12, 5) == (4, 6)
    assert nearest_divisors(12, 20) == (12,)
    assert nearest_divisors(12, 4) == (4, 6)
    assert nearest_multiples(7, 3) == (6, 9)
    assert nearest_multiples(2, 3) == (3,)


def test_groups_by_arithmetic_are_those_of_the_coordinates() -> None:
    choose = random.Random(26)
    for _ in range(40):
        tp, cp, pp, dp = (choose.choice((1, 1, 2, 3, 4)) for _ in range(4))
        ep = choose.choice([size for size in range(1, dp * cp + 1) if dp * cp % size == 0])
        replicas = dp * cp // ep
        instances = choose.choice([size for size in range(1, replicas + 1) if replicas % size == 0])
        layout = Layout(tp * cp * pp * dp, tp, cp, ep, pp, instances)
        for axis in AXES:
            groups = layout.groups(axis)
            assert layout.size(axis) == len(groups[0])
            assert all(layout.group_of(axis, rank) == group for group in groups for rank in (group[0], group[-1]))
            if len(groups) > 4 and axis != "embedding":
                assert layout.first_groups(axis) == (groups[0], groups[1], groups[-1])


def test_groups_of_a_hundred_thousand_ranks() -> None:
    """Takes a minute if the work grows with the square of the ranks."""
    assert Layout(131072).groups("world") == (tuple(range(131072)),)
    assert len(Layout(131072, tp=8, pp=16).groups("dp")) == 128

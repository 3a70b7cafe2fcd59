"""Random streams per rank, and generator states that a weights-only file can hold."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from megatron.distributed import rng
from megatron.layout import Layout


def draw() -> tuple[float, float, float, list[float]]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(3).tolist()


def test_a_state_restores_every_generator_through_a_weights_only_file() -> None:
    rng.seed_rank(1234, Layout(1).coordinates(0))
    draw()  # leaves half a pair in Python's and numpy's gaussians
    file = io.BytesIO()
    torch.save(rng.get_rng_state(), file)
    expected = [draw() for _ in range(3)]
    file.seek(0)
    rng.set_rng_state(torch.load(file, weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_a_state_is_plain() -> None:
    def check(value: object) -> None:
        if isinstance(value, dict):
            for part in value.values():
                check(part)
        elif isinstance(value, list):
            assert all(type(part) is int for part in value)
        elif isinstance(value, torch.Tensor):
            assert value.dtype == torch.uint8
        else:
            assert value is None or type(value) in (int, float, str)

    check(rng.get_rng_state())


def test_which_ranks_share_a_stream() -> None:
    layout = Layout(16, tp=2, cp=2, pp=2)
    seeds = {rank: rng.rank_seed(1234, layout.coordinates(rank)) for rank in range(16)}
    for rank, seed in seeds.items():
        same = {other for other in seeds if seeds[other] == seed}
        assert same == set(layout.group_of("tp", rank))


def test_seeding_is_a_function_of_seed_and_place() -> None:
    place = Layout(4).coordinates(3)
    rng.seed_rank(7, place)
    first = draw()
    rng.seed_rank(7, place)
    assert draw() == first
    rng.seed_rank(8, place)
    assert draw() != first
    assert rng.rank_seed(1234, Layout(1).coordinates(0)) == 7781012246468998592


def test_named_streams_do_not_collide() -> None:
    seeds = {rng.stream_seed(seed, name, index) for seed in range(20) for name in ("a", "b") for index in range(20)}
    assert len(seeds) == 800 and all(0 <= seed < 2**63 for seed in seeds)
    assert rng.stream_seed(1, 23) != rng.stream_seed(12, 3)

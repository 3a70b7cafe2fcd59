"""The division of layers over pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.stages import split_layers


@pytest.mark.parametrize(
    ("layers", "ranks", "how", "held"),
    [
        (6, 3, {}, [[(0, 2)], [(2, 4)], [(4, 6)]]),
        (6, 1, {}, [[(0, 6)]]),
        (5, 4, {"first": 2}, [[(0, 2)], [(2, 3)], [(3, 4)], [(4, 5)]]),
        (5, 4, {"last": 2}, [[(0, 1)], [(1, 2)], [(2, 3)], [(3, 5)]]),
        (8, 3, {"first": 1, "last": 3}, [[(0, 1)], [(1, 5)], [(5, 8)]]),
        (3, 2, {"first": 1, "last": 2}, [[(0, 1)], [(1, 3)]]),
        (8, 2, {"layers_per_chunk": 2}, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
    ],
)
def test_each_rank_holds(layers: int, ranks: int, how: dict[str, Any], held: list[list[tuple[int, int]]]) -> None:
    stages = split_layers(layers, ranks, **how)
    assert [[(run.start, run.stop) for run in stages.of_rank(rank)] for rank in range(ranks)] == held
    assert [layer for stage in stages.stages for layer in stage] == list(range(layers))

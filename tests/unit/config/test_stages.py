"""The division of layers over pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ParallelConfig
from megatron.config.stages import stage_layers
from megatron.errors import ConfigError

FIELDS = {
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "virtual": "num_layers_per_virtual_pipeline_stage",
    "stages": "num_virtual_stages_per_pipeline_rank",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
}


@pytest.mark.parametrize(
    ("layers", "ranks", "how", "held"),
    [
        (6, 3, {}, [[(0, 2)], [(2, 4)], [(4, 6)]]),
        (6, 1, {}, [[(0, 6)]]),
        (5, 4, {"first": 2}, [[(0, 2)], [(2, 3)], [(3, 4)], [(4, 5)]]),
        (5, 4, {"last": 2}, [[(0, 1)], [(1, 2)], [(2, 3)], [(3, 5)]]),
        (8, 3, {"first": 1, "last": 3}, [[(0, 1)], [(1, 5)], [(5, 8)]]),
        (3, 2, {"first": 1, "last": 2}, [[(0, 1)], [(1, 3)]]),
        (8, 2, {"virtual": 2}, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (8, 2, {"stages": 2}, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (8, 2, {"stages": 1}, [[(0, 4)], [(4, 8)]]),
        (7, 2, {"embedding": True}, [[(0, 3)], [(3, 7)]]),
        (7, 2, {"loss": True}, [[(0, 4)], [(4, 7)]]),
        (10, 3, {"embedding": True, "loss": True}, [[(0, 3)], [(3, 7)], [(7, 10)]]),
        (6, 2, {"embedding": True, "loss": True, "virtual": 2}, [[(0, 1), (3, 5)], [(1, 3), (5, 6)]]),
        (6, 2, {"embedding": True, "loss": True, "stages": 2}, [[(0, 1), (3, 5)], [(1, 3), (5, 6)]]),
        (3, 2, {"loss": True, "virtual": 1}, [[(0, 1), (2, 3)], [(1, 2), (3, 3)]]),
        (
            6,
            4,
            {"embedding": True, "loss": True, "stages": 2},
            [[(0, 0), (3, 4)], [(0, 1), (4, 5)], [(1, 2), (5, 6)], [(2, 3), (6, 6)]],
        ),
    ],
)
def test_each_rank_holds(layers: int, ranks: int, how: dict[str, Any], held: list[list[tuple[int, int]]]) -> None:
    fields = {FIELDS[name]: value for name, value in how.items()}
    stages = stage_layers(layers, ParallelConfig(pipeline_model_parallel_size=ranks, **fields))
    assert [[(run.start, run.stop) for run in stages.of_rank(rank)] for rank in range(ranks)] == held
    assert [layer for stage in stages.stages for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "ranks", "how", "message"),
    [
        (8, 1, {"stages": 2}, r"--num-virtual-stages-per-pipeline-rank 2: there is one pipeline stage"),
        (8, 1, {"loss": True}, r"--account-for-loss-in-pipeline-split: there is one pipeline stage"),
        (
            8,
            2,
            {"stages": 2, "virtual": 2},
            r"stage 2 and --num-virtual-stages-per-pipeline-rank both divide the layers",
        ),
        (
            8,
            2,
            {"embedding": True, "first": 2},
            r"split and --decoder-first-pipeline-num-layers both divide the layers",
        ),
        (8, 2, {"stages": 3}, r"8 is not divisible by .*size 2 x .*rank 3; use --num-virtual-.*rank 2 or 4"),
        (
            8,
            2,
            {"loss": True},
            r"--num-layers 8 \(9 with the embedding or the loss\) is not divisible by .*; use .*1 or 3",
        ),
    ],
)
def test_divisions_that_are_refused(layers: int, ranks: int, how: dict[str, Any], message: str) -> None:
    fields = {FIELDS[name]: value for name, value in how.items()}
    with pytest.raises(ConfigError, match=message):
        stage_layers(layers, ParallelConfig(pipeline_model_parallel_size=ranks, **fields))

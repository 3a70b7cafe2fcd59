"""A run with settings from DeepSpeed's JSON trains exactly as one with the same settings as flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.distributed import run_ranks
from tests.helpers.runs import Recorder, flags, make_parts
from tests.unit.compat.deepspeed_file.test_source import ARTICLE

SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "warmup_type": "linear"}}
FILE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": SCHEDULE,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 2e3},
    "gradient_clipping": 0.5,
    "bf16": {"enabled": "auto"},
}
SAME = """--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6
    --weight-decay 0.1 --lr-schedule WarmupDecayLR --warmup-max-lr 0.02 --warmup-num-steps 2 --warmup-type linear
    --total-num-steps 6 --clip-grad 0.5 --use-distributed-optimizer --ddp-bucket-size 2000
    --overlap-grad-reduce"""


def train(argv: list[str], rank: int) -> list[tuple[float, float, float]]:
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=2)
    with parts:
        parts.trainer.fit()
    return [(each["lm_loss"], each["grad_norm"], each["learning_rate"]) for each in records]


def both(folder: str, rank: int) -> tuple[list[Any], list[Any]]:
    given = {"micro_batch_size": None, "global_batch_size": None, "lr": None}
    by_file = [*flags(**given), "--deepspeed", "--deepspeed_config", f"{folder}/ds.json"]
    return train(by_file, rank), train([*flags(**given), *SAME.split()], rank)


def test_the_file_trains_as_the_flags_do(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    for found, wanted in run_ranks(2, lambda rank: both(str(tmp_path), rank)):
        assert found == wanted and len(found) == 6
        assert len({rate for _, _, rate in found}) > 3


def test_the_file_of_the_zero_article_trains(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(ARTICLE.replace('"initial_scale_power": 32', '"initial_scale_power": 8'))
    left_out = {"micro_batch_size": None, "global_batch_size": None, "lr": None, "train_iters": 4}
    argv = [*flags(**left_out), "--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")]
    for found in run_ranks(2, lambda rank: train(argv, rank)):
        assert len(found) == 4 and len({loss for loss, _, _ in found}) == 4

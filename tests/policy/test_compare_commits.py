"""tests/compare_commits.py finds a difference in any place; its table has every optimizer, stage and schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.pipeline_schedules import SCHEDULES
from tests.compare_commits import Difference, first_difference, same_metrics
from tests.compare_commits_table import TABLE


def content() -> dict[str, Any]:
    weight = torch.arange(6.0).to(torch.bfloat16).reshape(2, 3)
    return {"model": {"w": weight}, "rates": [1e-3, 2e-3], "run_id": "a", "config": {"seed": 1, "save": "x"}}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    copy = content()
    change(copy)
    return copy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda it: it["model"]["w"].view(torch.int16)[1].add_(1), "/model/w"),
        (lambda it: it["model"].update(w=it["model"]["w"].float()), "/model/w"),
        (lambda it: it["model"].update(v=torch.zeros(1)), "/model/v: only one has it"),
        (lambda it: it["rates"].append(0.0), "/rates: 2 and 3 values"),
        (lambda it: it["rates"].__setitem__(1, 2.0000000000000005e-3), "/rates/1"),
        (lambda it: it["config"].update(seed=True), "/config/seed: int and bool"),
    ],
)
def test_one_bit_is_found(change: Callable[[dict[str, Any]], object], named: str) -> None:
    assert named in str(first_difference(content(), changed(change)))


def test_what_is_of_a_run_alone_is_passed_over() -> None:
    other = changed(lambda it: (it.update(run_id="b"), it["config"].update(save="y")))
    assert first_difference(content(), other) is None
    nan = {"w": torch.tensor([float("nan"), -0.0])}
    assert first_difference(nan, {"w": nan["w"].clone()}) is None
    assert first_difference(nan, {"w": torch.tensor([float("nan"), 0.0])}) is not None


def test_one_digit_of_a_loss_is_found(tmp_path: Path) -> None:
    def run(name: str, *losses: float) -> Path:
        lines = [{"iteration": n, "split": "train", "lm_loss": x, "seconds": n * x} for n, x in enumerate(losses, 1)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return tmp_path / name

    first = run("a", 2.5, 2.25, 2.125)
    same_metrics(first, run("b", 2.5, 2.25, 2.125))
    same_metrics(first, run("c", 2.0, 2.25, 2.125), later_than=1)
    with pytest.raises(Difference, match=r"iteration 3: lm_loss: 2\.125 and 2\.1250000000000004"):
        same_metrics(first, run("d", 2.5, 2.25, 2.1250000000000004))
    with pytest.raises(ValueError, match="shorter"):
        same_metrics(first, run("e", 2.5, 2.25))


def values_of(flag: str) -> set[str]:
    words = [row.words.split() for row in TABLE]
    return {words[n + 1] for words in words for n, word in enumerate(words) if word == flag}


def test_the_table_has_every_optimizer_stage_and_schedule() -> None:
    (optimizer,) = [field for field in fields(OptimizerConfig) if field.name == "optimizer"]
    assert {"adam", *values_of("--optimizer")} >= set(optimizer.metadata["flag"].choices)
    assert values_of("--zero-stage") == {"0", "1", "2", "3"}
    assert values_of("--pipeline-schedule") == set(SCHEDULES)
    assert len({row.name for row in TABLE}) == len(TABLE) and {row.ranks for row in TABLE} >= {1, 2, 4, 8}

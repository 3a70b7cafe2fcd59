"""A number reported by name is reduced over the ranks and appears wherever numbers are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.engine import Engine
from megatron.engine.reports import StepReports
from megatron.errors import NonFiniteError
from megatron.layout import Layout
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, pretrain_here

RANKS = 3


def reduced(rank: int) -> list[dict[str, float]]:
    reports, found = StepReports(ParallelState.build(Layout(RANKS), rank).world), []
    for step in range(2):
        for name, reduce in (("a", "sum"), ("b", "max"), ("c", "mean"), ("d", "same"), ("e", "sum")):
            own = 7.0 if reduce == "same" else float(rank + step)
            reports.report(name, torch.tensor(own), reduce)  # type: ignore[arg-type]
        found.append({name: value.item() for name, value in reports.take().items()})
    assert reports.take() == {}
    return found


def test_each_number_is_reduced_as_it_asks() -> None:
    expected = [{"a": 3 + 3 * step, "b": 2 + step, "c": 1 + step, "d": 7, "e": 3 + 3 * step} for step in range(2)]
    assert run_ranks(RANKS, reduced) == [expected] * RANKS


def test_two_numbers_of_one_name_are_our_mistake() -> None:
    reports = StepReports(Axis.single("world"))
    reports.report("a", torch.tensor(1.0))
    with pytest.raises(AssertionError, match="a is reported twice"):
        reports.report("a", torch.tensor(1.0))


def reports_beside_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = Engine._gradients

    def and_report(self: Engine, *args: object) -> object:
        self.report("largest_logit", torch.tensor(2.5), "max")
        return gradients(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "_gradients", and_report)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_computed_again_reports_again(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a NaN loss is computed again, after the next step's gradients. A caller that continues after the
    error begins a new step."""
    reports_beside_its_gradients(monkeypatch)
    monkeypatch.setattr("megatron.engine.assembly.runs_ahead", lambda device: ahead)
    _, parts = make_parts(flags())
    forward = parts.engine.passes.forward_step

    def bad(model: Any, batch: Any) -> Any:
        total, count = forward(model, batch)
        return total * float("nan"), count

    parts.engine.passes.forward_step = bad
    with parts:
        for _ in range(2):
            with pytest.raises(NonFiniteError, match="the loss is nan"):
                parts.trainer.iterate(2)


@pytest.mark.parametrize("form", ["classic", "compact"])
def test_a_new_number_needs_no_other_place(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports_beside_its_gradients(monkeypatch)
    metrics = tmp_path / "metrics.jsonl"
    settings = flags(train_iters=2, log_format=form, metrics_jsonl=metrics, log_num_zeros_in_grad=True)
    assert pretrain_here(settings) == 0
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["largest_logit"] for record in records if record["split"] == "train"] == [2.5, 2.5]
    shown = "largest_logit: 2.500000E+00" if form == "classic" else "largest_logit 2.5"
    assert capsys.readouterr().out.count(shown) == 2

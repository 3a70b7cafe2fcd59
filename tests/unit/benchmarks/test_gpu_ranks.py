"""The report of real devices, on two CPU ranks over gloo: equal layouts, and a row for every failure."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.utils.process import process_state
from tests.helpers.scripts import load_script
from tests.helpers.warm import warm_python
from tests.policy.rules import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_ranks.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(SCRIPT)


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--cases", "PP2 interleaved", "--json", "out.json"]
    done = subprocess.run(
        [warm_python(), str(SCRIPT), *flags], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    pipeline, bandwidths = json.loads((tmp_path / "out.json").read_text())["results"]
    assert pipeline["verdict"] == "equal" and 0 <= pipeline["loss"] <= 1e-5 and 0 <= pipeline["grad_norm"] <= 1e-4
    assert bandwidths["verdict"] == "done"
    measured = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring shift")
    assert all(sum(line.startswith(name) for line in bandwidths["said"]) == 1 for name in measured), bandwidths


def test_every_case_is_a_launch_that_the_settings_allow(tool: ModuleType) -> None:
    """GPU cases too, which have other sizes; nothing is started."""
    from megatron.config import check_world
    from megatron.training.settings import read_settings

    for case in tool.CASES:
        config = read_settings([*tool._model("cpu"), *case.model, *case.flags], needs_data=True)
        check_world(config, case.ranks)
        assert config.parallel.fewest_ranks in (case.ranks, 1)
    schedules = {schedule for case in tool.CASES for schedule in case.name.split() if case.name.startswith("PP2 ")}
    assert {"gpipe", "1f1b", "interleaved", "zero-bubble"} <= schedules
    assert {"p2p", "a2a", "allgather"} <= {word for case in tool.CASES for word in case.name.split()}


def test_a_hang_and_a_failure_are_rows(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank that ignores everything is killed with its launcher; the row shows its last output."""
    pid = tmp_path / "pid"
    hanging = tmp_path / "hanging.py"
    hanging.write_text(
        f"""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
print("in the first step", flush=True)
time.sleep(600)
"""
    )
    ended = tool.run_within(["sh", "-c", f"{sys.executable} {hanging} & wait"], 5.0, {})
    row = tool.failure(ended, 5.0)
    assert row["verdict"] == "HUNG: not done within 5 s: in the first step"
    until = time.monotonic() + 20
    while process_state(int(pid.read_text())) not in ("", "Z"):
        assert time.monotonic() < until, "the rank lives on"
        time.sleep(0.05)

    case = replace(tool.NAMED["TP2"], flags=("--tensor-model-parallel-size", "3"))
    row = tool.judge(case, [], "cpu", 60.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert row["verdict"].startswith("FAILED (exit code 1): error: ") and "3" in row["verdict"], row
    assert row["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and tool.line(row).startswith("TP2 ")


@pytest.mark.parametrize(
    ("loss", "norm", "verdict"),
    [(2.0, 1.0, "equal"), (2.0 + 1e-6, 1.0, "equal"), (2.0 + 1e-4, 1.0, "DIFFERENT"), (2.0, 1.001, "DIFFERENT"),
     (float("nan"), 1.0, "DIFFERENT"), (2.0, float("nan"), "DIFFERENT")],
)  # fmt: skip
def test_numbers_beyond_rounding_are_told(tool: ModuleType, loss: float, norm: float, verdict: str) -> None:
    def step(loss: float, norm: float) -> dict[str, Any]:
        return {"lm_loss": loss, "grad_norm": norm}

    assert tool.held_against([step(2.0, 1.0), step(loss, norm)], [step(2.0, 1.0)] * 2)["verdict"] == verdict


def test_when_the_time_is_over_the_rest_is_named(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = tool.main(["--device", "cpu", "--cases", "TP2", "DP2", "--seconds", "0"])
    said = capsys.readouterr().out
    assert code == 1 and said.count("NOT RUN: the time is over") == 2 and "bus bandwidths" in said


def test_a_case_that_the_whole_time_cuts_off_is_no_hang(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []

    def train(ranks: int, flags: object, device: str, seconds: float, environment: object) -> Any:
        started.append(seconds)
        return tool.Ended(None, ("in the first step",), seconds)

    monkeypatch.setattr(tool, "train", train)
    arguments = argparse.Namespace(device="cpu", seconds=600.0, case_seconds=90.0, json=None)
    for whole, verdict in ((600.0, "HUNG: not done within 90 s"), (30.0, "NOT RUN to its end: --seconds")):
        arguments.seconds = whole
        report = tool.Report(arguments, {})
        report.case(tool.NAMED["TP2"], {})
        assert report.rows[0]["verdict"].startswith(verdict), report.rows


def test_a_case_for_more_devices_than_there_are_is_a_row(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "devices", lambda kind: 2)
    monkeypatch.setattr(tool, "run_within", lambda *_: tool.Ended(0, (), 1.0))
    assert tool.main(["--cases", "TP2 x PP2", "--connections", "8"]) == 0
    assert "left out: needs 4 devices, found 2" in capsys.readouterr().out


def test_one_device_is_refused(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(tool, "devices", lambda kind: 1)
    with pytest.raises(SystemExit):
        tool.main(["--device", "cuda"])
    assert "--device cuda: needs two devices, found 1" in capsys.readouterr().err


def test_kernels_are_compared_where_they_are_asked_for(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--kernels-on", "cpu"]) == 0, capsys.readouterr().out
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") is None

"""The benchmark of whole steps on a GPU, on the smallest shape and a CPU: it runs, and its arithmetic is right."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.scripts import load_script
from tests.helpers.warm import warm_python

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_steps.py"


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    return load_script(SCRIPT)


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    flags = ["--sizes", "tiny", "--device", "cpu", "--iters", "10", "--warm-up", "5", "--json", "out.json"]
    done = subprocess.run(
        [warm_python(), str(SCRIPT), *flags], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["blocks"] == 1
    assert result["tokens_per_second"] == pytest.approx(2 * 64 / (result["ms"] / 1e3))
    assert result["utilisation"] == pytest.approx(result["tflops"] / 989.4)


def test_a_run_that_fails_is_told_and_fails_the_benchmark(tmp_path: Path) -> None:
    flags = ["--sizes", "tiny", "--device", "cpu", "--iters", "20", "--flags=--fp16 --loss-scale -1"]
    done = subprocess.run(
        [warm_python(), str(SCRIPT), *flags], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1 and "tiny   error: " in done.stdout


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.30, "MISSED"), (0.39, "bar 38%, aim 42%: reached"), (0.43, "aim reached")]
)
def test_a_size_is_held_against_its_bar(steps: ModuleType, share: float, verdict: str) -> None:
    result = {
        "micro_batch": 64,
        "ms": 1.0,
        "tokens_per_second": 1.0,
        "samples_per_second": 1.0,
        "tflops": 1.0,
        "utilisation": share,
    }
    assert steps.line(steps.NAMED["124M"], result).endswith(verdict)


def test_what_does_not_fit_is_tried_with_half_the_batch(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def once(size: Any, *args: Any) -> dict[str, Any]:
        tried.append(size.micro_batch)
        if size.micro_batch > 2:
            said = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."]
            return {"size": size.name, "micro_batch": size.micro_batch, "failed": said[-1], "said": said}
        numbers = dict.fromkeys(("ms", "tokens_per_second", "samples_per_second", "tflops"), 1.0)
        return {"size": size.name, "micro_batch": size.micro_batch, "utilisation": 0.51, **numbers}

    monkeypatch.setattr(steps, "measure_once", once)
    size = steps.NAMED["2.7B"]
    result = steps.measure(size, "cuda", 40, 15, [])
    assert tried == [8, 4, 2] and result["micro_batch"] == 2
    assert "micro-batch 8 does not fit: torch.OutOfMemoryError" in capsys.readouterr().out
    assert steps.line(size, result).endswith("reached (micro-batch 2: 8 does not fit)")
    tried.clear()
    assert steps.measure(size, "cuda", 40, 15, [], until=0.0)["failed"] and tried == [8]  # the time is out

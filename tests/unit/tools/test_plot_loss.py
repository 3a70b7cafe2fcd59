"""The terminal plot: the right points in the right places, and one line when there is nothing to draw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def plot(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "plot_loss.py"), *arguments]
    environment = {"PYTHONIOENCODING": encoding}
    return subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False)


def metrics(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def falling(count: int) -> list[dict]:
    return [{"iteration": i, "split": "train", "lm_loss": 8.0 - i, "grad_norm": 1.0} for i in range(1, count + 1)]


def test_a_falling_curve_falls(tmp_path: Path) -> None:
    rows = [
        *falling(5),
        {"iteration": 5, "split": "valid", "lm_loss": 7.0},
        {"iteration": 5, "split": "test", "lm_loss": 99.0},
    ]
    done = plot("--metrics-jsonl", metrics(tmp_path / "m", rows), "--width", "21", "--height", "5")
    assert done.returncode == 0, done.stderr
    cells = [line.partition("|")[2] for line in done.stdout.splitlines() if "|" in line]
    assert [row.find("•") for row in cells] == [0, 5, 10, 15, 20]
    assert cells[0].find("◆") == 20, "validation at 7.0 is as high as the first training loss"
    assert "7.000" in done.stdout and "3.000" in done.stdout and "iteration 5" in done.stdout
    assert "99" not in done.stdout, "the one test loss is no curve"


def test_later_lines_of_a_resumed_run_count(tmp_path: Path) -> None:
    rows = [*falling(3), {"iteration": 3, "split": "train", "lm_loss": 9.0}]
    assert "9.000" in plot("--metrics-jsonl", metrics(tmp_path / "m", rows)).stdout


def test_nan_is_left_out_and_a_plain_terminal_gets_ascii(tmp_path: Path) -> None:
    rows = [*falling(3), {"iteration": 4, "split": "train", "lm_loss": float("nan")}]
    done = plot("--metrics-jsonl", metrics(tmp_path / "m", rows), encoding="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and "*" in done.stdout and "iteration 3" in done.stdout


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        ("", "no line with a finite"),
        ("{broken\n", "line 1 is not a JSON object"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"split": "train", "lm_loss": 1.0}\n', "no line with a finite"),
        ('{"split": [1], "lm_loss": 1.0, "iteration": 1}\n', "no line with a finite"),
    ],
)
def test_nothing_to_draw_is_one_line(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "m"
    if content is not None:
        path.write_text(content)
    done = plot("--metrics-jsonl", str(path))
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_misspelt_flag_is_one_line() -> None:
    done = plot("--metric-jsonl", "m")
    assert done.returncode == 2
    assert done.stderr == "error: --metric-jsonl: no such flag; did you mean --metrics-jsonl?\n"

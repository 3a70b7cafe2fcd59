"""The table of results has the run's own numbers; other runs' are marked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from megatron.cli.results_table import main
from megatron.report.results import SizeResult, draw_bars, row_of_run

TRAIN = {"split": "train", "lm_loss": 2.0}


def metrics(path: Path, *lines: dict) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def trained(iteration: int, speed: float) -> dict:
    return {**TRAIN, "iteration": iteration, "samples_per_second": speed}


def evaluated(iteration: int, ppl: float, split: str = "valid") -> dict:
    return {"split": split, "iteration": iteration, "lm_loss": 1.0, "lm_loss_ppl": ppl}


def row(path: Path, *lines: dict) -> SizeResult:
    return row_of_run("345M", "8 GPU", Path(metrics(path, *lines)))


def test_a_row_is_the_median_speed_and_the_last_validation(tmp_path: Path) -> None:
    lines = [trained(2, 1.0), trained(4, 10.0), evaluated(4, 50.0), trained(6, 30.0), trained(8, 20.0)]
    found = row(tmp_path / "m", *lines, evaluated(9, 40.0), evaluated(9, 99.0, "test"))
    assert (found.samples_per_second, found.perplexity, found.steps) == (20.0, 40.0, 9)
    assert row(tmp_path / "m", trained(2, 7.0)) == SizeResult(
        size="345M", devices="8 GPU", samples_per_second=7.0, perplexity=None, steps=2
    )


def test_a_run_that_began_anew_has_no_number_of_the_one_before(tmp_path: Path) -> None:
    """A run from the start must not show the earlier run's perplexity; both append to one file."""
    before = [trained(10, 5.0), trained(20, 5.0), evaluated(20, 11.0)]
    resumed = row(tmp_path / "m", *before, trained(30, 8.0), evaluated(30, 10.0))
    assert (resumed.samples_per_second, resumed.perplexity, resumed.steps) == (6.5, 10.0, 30)
    anew = row(tmp_path / "m", *before, trained(10, 9.0))
    assert (anew.samples_per_second, anew.perplexity, anew.steps) == (9.0, None, 10)


def published(tmp_path: Path) -> str:
    rows = [{"size": "345M", "devices": "8 NPU", "samples_per_second": 59.7, "perplexity": 26.485, "steps": 500000}]
    path = tmp_path / "published.json"
    path.write_text(json.dumps({"source": "by others", "rows": rows}))
    return str(path)


def test_the_table_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = metrics(tmp_path / "m", trained(5, 3.25), evaluated(5, 123.456789))
    picture = tmp_path / "table.png"
    assert main(["--run", "tiny", "1 cpu", run, "--published", published(tmp_path), "--output", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["size", "devices", "samples/s", "PPL", "steps", "measured"]
    assert lines[2].split() == ["tiny", "1", "cpu", "3.25", "123.46", "5", "here"]
    assert lines[3].split() == ["345M", "8", "NPU", "59.7", "26.485", "500000", "published"]
    assert "published: by others." in lines and "validation split" in lines[4]
    with Image.open(picture) as image:
        assert image.size[0] > 1000


def test_the_picture_marks_what_others_published() -> None:
    ours = SizeResult(size="tiny", devices="1 cpu", samples_per_second=70.0, perplexity=None, steps=5)
    theirs = SizeResult(
        size="345M", devices="8 GPU", samples_per_second=37.8, perplexity=26.4, steps=None, published=True
    )
    figure = draw_bars([ours, theirs], "by others")
    speed, quality = figure.axes
    assert [label.get_text() for label in speed.get_yticklabels()] == ["tiny, 1 cpu, 5 steps", "345M, 8 GPU"]
    bars = [[patch for patch in axes.patches if patch.get_width() > 1] for axes in (speed, quality)]
    assert [bar.get_width() for bar in bars[0]] == [70.0, 37.8] and [bar.get_width() for bar in bars[1]] == [26.4]
    assert bars[0][0].get_facecolor() != bars[0][1].get_facecolor() == bars[1][0].get_facecolor()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("iteration 3 | lm loss\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    good, empty = metrics(tmp_path / "good", trained(1, 1.0)), metrics(tmp_path / "empty")
    odd = tmp_path / "odd.json"
    odd.write_text('{"source": "x", "rows": [{"size": "345M"}]}')
    for arguments, named in (
        (["--run", "a", "b", str(tmp_path / "log")], "line 1 is not a record of an iteration"),
        (["--run", "a", "b", str(tmp_path / "bytes")], "not UTF-8"),
        (["--run", "a", "b", str(tmp_path / "none")], "No such file"),
        (["--run", "a", "b", empty], "no line with samples/s or a perplexity"),
        (["--run", "a", "b", good, "--published", str(odd)], "published.rows.devices is missing"),
        (["--run", "a", "b", good, "--output", "table.pdf"], "give a name that ends in .png"),
        (["--run", "a", "b", good, "--output", str(tmp_path / "no" / "t.png")], "cannot be written"),
    ):
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and told.startswith("error: ") and named in told


def test_a_picture_without_matplotlib_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = metrics(tmp_path / "m", trained(1, 1.0))
    assert main(["--run", "a", "b", run, "--output", str(tmp_path / "t.png")]) == 2
    told = capsys.readouterr()
    assert "needs matplotlib" in told.err and told.out.startswith("size"), "the table is there"

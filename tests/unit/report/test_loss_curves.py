"""Loss curves: the right points in the right places, from the metrics file and logs, in the terminal and as a PNG."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from megatron.errors import ConfigError
from megatron.report.loss_curves import LoggedRun, draw_curves, read_log, read_metrics
from megatron.report.picture import write_picture
from tests.helpers.runs import flags, pretrain_here

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


def test_named_validation_sets_have_curves_of_their_own(tmp_path: Path) -> None:
    named = ["validation-web", "validation-code"]
    rows = [{"iteration": i, "split": split, "lm_loss": i + 2.0 * j} for i in (1, 5) for j, split in enumerate(named)]
    path = metrics(tmp_path / "m", [*falling(5), *rows])
    log = tmp_path / "log"
    line = " validation loss at iteration {iteration} on validation set ({split}) | lm loss: {lm_loss} |\n"
    log.write_text("".join(line.format(**row) for row in rows))
    expected = {"validation-web": {1: 1.0, 5: 5.0}, "validation-code": {1: 3.0, 5: 7.0}}
    run = read_metrics(Path(path), "lm_loss")
    assert {name: run.curves[name] for name in named} == read_log(log, "lm_loss").curves == expected
    shown = plot("--metrics-jsonl", path, "--width", "21", "--height", "8").stdout
    assert "◆ validation-web   ▲ validation-code" in shown and shown.count("▲") == 3
    _, web, code = draw_curves([run], "lm_loss").axes[0].lines
    assert [line.get_label() for line in (web, code)] == named and web.get_marker() != code.get_marker()


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


THEIR_LOG = """
using world size: 8, data-parallel size: 8
 [2026-01-02 03:04:05] iteration       10/     100 | consumed samples:          80 | \
learning rate: 1.000000E-04 | global batch size:     8 \
| lm loss: 1.050000E+01 | loss scale: 1.0 | grad norm: 2.500 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration       20/     100 | consumed samples:         160 | learning rate: 9.000E-05 | global batch size:     8 \
| lm loss: 9.500000E+00 | loss scale: 1.0 | grad norm: 1.500 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
------------------------------------------------------------------------------------------------------------
 validation loss at iteration 20 | lm loss value: 9.750000E+00 | lm loss PPL: 1.715423E+04 |
------------------------------------------------------------------------------------------------------------
 validation loss at iteration 20 on validation set | lm loss value: 9.800000E+00 | lm loss PPL: 1.715423E+04 |
 validation loss at iteration 20 on test set | lm loss value: 1.234000E+02 | lm loss PPL: 1.715423E+04 |
"""


def test_megatrons_own_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(THEIR_LOG)
    assert read_log(log, "lm_loss").curves == {"train": {10: 10.5, 20: 9.5}, "valid": {20: 9.8}}
    assert read_log(log, "grad_norm").curves == {"train": {10: 2.5, 20: 1.5}}
    assert read_log(log, "learning_rate").curves == {"train": {10: 1e-4, 20: 9e-5}}


@pytest.mark.parametrize("form", ["classic", "compact"])
@pytest.mark.parametrize("value", ["mean_lm_loss", "grad_norm", "learning_rate"])
def test_a_log_holds_the_curves_of_the_metrics_file(form: str, value: str, tmp_path: Path) -> None:
    log, metrics = tmp_path / "log", tmp_path / "metrics.jsonl"
    with log.open("w") as stream, contextlib.redirect_stdout(stream):
        settings = {"eval_iters": 1, "eval_interval": 2, "train_iters": 3, "metrics_jsonl": metrics}
        assert pretrain_here(flags(**settings, log_format=form)) == 0
    mine, exact = read_log(log, value).curves, read_metrics(metrics, value).curves
    assert mine["train"] == pytest.approx(exact["train"], rel=1e-3)
    assert list(mine["train"]) == [1, 2, 3]
    if value == "mean_lm_loss":
        assert mine["valid"] == pytest.approx(read_metrics(metrics, "lm_loss").curves["valid"], rel=1e-6)


def test_a_picture_of_several_runs_names_axes_and_runs(tmp_path: Path) -> None:
    runs = [
        LoggedRun("first", {"train": {1: 4.0, 2: 3.0, 4: 2.0}, "valid": {4: 2.5}}),
        LoggedRun("second", {"train": {2: 1.0, 1: 5.0}}),
    ]
    (axes,) = draw_curves(runs, "lm_loss").axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("iteration", "lm loss")
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["first: train", "first: valid", "second: train"]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert drawn == [([1, 2, 4], [4.0, 3.0, 2.0]), ([4], [2.5]), ([1, 2], [5.0, 1.0])]
    train, valid, other = axes.lines
    assert train.get_color() == valid.get_color() != other.get_color()
    assert train.get_linestyle() != valid.get_linestyle()


def test_the_tool_writes_a_png_of_metrics_and_logs(tmp_path: Path) -> None:
    log, picture = tmp_path / "train.log", tmp_path / "loss.png"
    log.write_text(THEIR_LOG)
    done = plot("--metrics-jsonl", metrics(tmp_path / "m", falling(5)), "--log", str(log), "--output", str(picture))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{picture}: lm_loss of {tmp_path / 'm'}, {log}\n"
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--metrics-jsonl and --log: neither is given"),
        (["--log", "a", "b"], "the terminal shows one run, and 2 are given; add --output"),
        (["--log", "a", "--output", "a.jpg"], "--output a.jpg: only PNG is written"),
        (["--log", "a", "--names", "x", "y"], "--names: 2 names for 1 runs"),
        (["--log", "nowhere"], "--log nowhere: No such file or directory; give the file that a run's output went to"),
    ],
)
def test_refused(arguments: list[str], named: str) -> None:
    done = plot(*arguments)
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--output .*x.png: drawing needs matplotlib, .* install matplotlib"):
        write_picture(lambda: draw_curves([LoggedRun("a", {"train": {1: 1.0}})], "lm_loss"), tmp_path / "x.png")


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x.png: cannot be written \(No such file or directory\)"):
        write_picture(
            lambda: draw_curves([LoggedRun("a", {"train": {1: 1.0}})], "lm_loss"), tmp_path / "nowhere" / "x.png"
        )


def test_a_misspelt_flag_is_one_line() -> None:
    done = plot("--metric-jsonl", "m")
    assert done.returncode == 2
    assert done.stderr == "error: --metric-jsonl: no such flag; did you mean --metrics-jsonl?\n"

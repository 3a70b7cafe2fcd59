"""tools/draw_pipeline.py draws a simulated schedule and a recorded step, and rejects what it cannot draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from megatron.cli.draw_pipeline import main
from megatron.report.pipeline_picture import ticks
from megatron.report.pipeline_timeline import read_timelines
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts


def test_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pipeline.png"
    assert main(["--schedule", "interleaved", "--chunks", "2", "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said and "bubble 18.8%" in said
    with Image.open(picture) as image:
        assert image.width > 1000 and len(image.getcolors(1 << 16) or ()) > 6


def test_larger_groups_wait_longer_for_their_first_backward_pass(tmp_path: Path, capsys: Any) -> None:
    flags = ["--schedule", "interleaved", "--chunks", "2", "--micro-batches", "9", "--group", "5"]
    assert main([*flags, "--output", str(tmp_path / "pipeline.png")]) == 0
    assert "9 micro-batches, 2 chunks per rank; bubble 16.7%" in capsys.readouterr().out


def test_zero_bubble_stands_beside_its_own_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "zero-bubble", "--output", str(tmp_path / "pipeline.png")]) == 0
    assert "bubble 12.5% of the work, (p-1)/(3 m) is 12.5%" in capsys.readouterr().out


def texts_of(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written, write = [], ImageDraw.ImageDraw.text

    def spy(pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, **options: Any) -> None:
        width, height = pen.im.size
        inside = 0 <= place[0] <= width - 5 * len(text) and 0 <= place[1] <= height - 10
        assert inside, text
        written.append(text)
        write(pen, place, text, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ImageDraw.ImageDraw, "text", spy)
        assert main(argv) == 0
    return written


def test_axes_have_titles_and_units_and_colours_a_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = ["--output", str(tmp_path / "p.png")]
    texts = texts_of(["--schedule", "interleaved", "--chunks", "2", *output], monkeypatch)
    assert {"stage 0", "stage 3", "time (1 = a forward pass)"} <= set(texts)
    assert {f"{kind}, chunk {chunk}" for kind in ("forward", "backward") for chunk in (0, 1)} <= set(texts)
    assert [text for text in texts if "idle" in text]
    texts = texts_of(["--schedule", "zero-bubble", *output], monkeypatch)
    assert {"forward", "backward, inputs only", "weight gradients"} <= set(texts)


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        (10.0, [0, 2, 4, 6, 8, 10]),
        (57.0, [0, 10, 20, 30, 40, 50]),
        (0.0131, [0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.012]),
        (4999.0, [0, 500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500]),
    ],
)
def test_ticks_are_round_numbers(end: float, shown: list[float]) -> None:
    assert ticks(end) == shown


def run(rank: int, argv: list[str]) -> bool:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=2)
    with parts:
        parts.trainer.fit()
    return True


def test_a_real_step(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "trace"
    settings = flags(pipeline_model_parallel_size=2, pipeline_trace=folder, train_iters=2)
    assert run_ranks(2, run, settings) == [True, True]
    trace = read_timelines(folder)[-1]
    assert trace.ranks == 2 and trace.micro_batches == 4 and len(trace.spans) == 16
    last_forward = max(s.end for s in trace.spans if s.rank == 0 and s.action.kind == "F")
    assert last_forward < max(s.end for s in trace.spans)
    ends = {(s.rank, s.action): s for s in trace.spans}
    for (rank, action), span in ends.items():
        if rank == 1 and action.kind == "F":
            assert span.start >= ends[0, action].start, "a stage cannot start before the one in front of it"
    texts = texts_of(["--trace", str(folder), "--output", str(tmp_path / "real.png")], monkeypatch)
    assert {"time (ms)", "forward", "backward"} <= set(texts)
    assert "measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "--trace and --schedule"),
        (["--trace", "nowhere"], "no rank*.json"),
        (["--schedule", "gpipe", "--chunks", "2"], "--chunks 2"),
        (["--schedule", "interleaved", "--chunks", "2", "--micro-batches", "6"], "a group needs at least --stages 4"),
        (["--schedule", "interleaved", "--chunks", "2", "--micro-batches", "8", "--group", "6"], "a multiple of 6"),
        (["--schedule", "interleaved", "--chunks", "2", "--group", "3"], "a group needs at least --stages 4"),
        (["--schedule", "1f1b", "--group", "4"], "--group 4: only --schedule interleaved"),
        (
            ["--schedule", "1f1b", "--stages", "1024", "--micro-batches", "49"],
            "a picture shows at most 100000 passes",
        ),
    ],
)
def test_refused(argv: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--output", str(tmp_path / "p.png")]) == 2
    assert word in capsys.readouterr().err


def test_a_damaged_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank00000.json").write_text("[]")
    assert main(["--trace", str(tmp_path), "--output", str(tmp_path / "p.png")]) != 0
    assert "rank00000.json" in capsys.readouterr().err

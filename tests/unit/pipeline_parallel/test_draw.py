"""tools/draw_pipeline.py draws a simulated schedule and a recorded step, and refuses what it cannot draw."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from megatron.pipeline_parallel.draw import main
from megatron.pipeline_parallel.pass_recorder import read_timelines
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts


def test_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pipeline.png"
    assert main(["--schedule", "interleaved", "--chunks", "2", "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said and "bubble 18.8%" in said
    with Image.open(picture) as image:
        assert image.width > 1000 and len(image.getcolors(1 << 16) or ()) > 6


def test_zero_bubble_stands_beside_its_own_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "zero-bubble", "--output", str(tmp_path / "pipeline.png")]) == 0
    assert "bubble 12.5% of the work, (p-1)/(3 m) is 12.5%" in capsys.readouterr().out


def run(rank: int, argv: list[str]) -> bool:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=2)
    with parts:
        parts.trainer.fit()
    return True


def test_a_real_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert main(["--trace", str(folder), "--output", str(tmp_path / "real.png")]) == 0
    assert "measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "--trace and --schedule"),
        (["--trace", "nowhere"], "no rank*.json"),
        (["--schedule", "gpipe", "--chunks", "2"], "--chunks 2"),
        (["--schedule", "interleaved", "--chunks", "2", "--micro-batches", "6"], "multiple of --stages 4"),
    ],
)
def test_refused(argv: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--output", str(tmp_path / "p.png")]) == 2
    assert word in capsys.readouterr().err


def test_a_damaged_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank00000.json").write_text("[]")
    assert main(["--trace", str(tmp_path), "--output", str(tmp_path / "p.png")]) != 0
    assert "rank00000.json" in capsys.readouterr().err

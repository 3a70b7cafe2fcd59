"""The pictures of docs/: the data behind each is its source's, and tools/draw_docs.py draws the committed files."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from megatron.data.indexed.builder import IndexedDatasetBuilder
from tests.docs.blocks import PAGES, ROOT
from tests.helpers.runs import launch
from tools import draw_docs

FOLDER = ROOT / "docs" / "pictures"
LARGEST = 100_000


@pytest.mark.parametrize("name", draw_docs.PICTURES)
def test_the_committed_picture_is_what_is_drawn(name: str) -> None:
    committed = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == draw_docs.PICTURES[name](), "run python tools/draw_docs.py"
    assert len(committed.encode()) <= LARGEST
    assert "<text" in committed and "<image" not in committed and "prefers-color-scheme:dark" in committed


def test_each_picture_is_on_one_page_with_a_caption_and_an_alt_text() -> None:
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES if page.startswith("docs/"))
    shown = re.findall(r"^!\[(.{20,})\]\(pictures/(\w+)\.svg\)\n\*(.{40,})\*$", text, re.M)
    assert sorted(name for _, name, _ in shown) == sorted(draw_docs.PICTURES)
    assert text.count("](pictures/") == len(shown)
    assert sorted(path.stem for path in FOLDER.glob("*.svg")) == sorted(draw_docs.PICTURES)


def test_groups_of_the_rank_grid() -> None:
    """Tensor-parallel ranks are neighbours, then come data-parallel ones, then stages."""
    assert draw_docs.rank_groups() == {
        "tp": [[rank, rank + 1] for rank in range(0, 16, 2)],
        "dp": [[first, first + 2, first + 4, first + 6] for first in (0, 1, 8, 9)],
        "pp": [[rank, rank + 8] for rank in range(8)],
    }


def test_steps_of_the_pipelines() -> None:
    """Four stages and eight micro-batches of three units each: 24 units of work, and the bubble."""
    steps = draw_docs.pipeline_steps()
    assert {name: step.end for name, step in steps.items()} == {
        "gpipe": 24 * (1 + 3 / 8),
        "1f1b": 24 * (1 + 3 / 8),
        "interleaved": 24 * (1 + 3 / 16),
        "zero-bubble": 24 * (1 + 3 / 24),
    }
    assert sum(len(step.spans) for step in steps.values()) + 4 == draw_docs.draw_pipeline_schedules().count("<rect")


def test_bytes_of_zero() -> None:
    """bf16: 2 bytes of weight, 4 of gradient, 4 of master and 8 of moments for each of 7 billion parameters."""
    billions = {stage: kept.total / 7e9 for stage, kept in draw_docs.zero_bytes().items()}
    assert billions == pytest.approx({0: 18, 1: 2 + 4 + 12 / 8, 2: 16 / 8, 3: 16 / 8})
    assert re.findall(r'class="b">([\d.]+) GB', draw_docs.draw_zero_memory()) == ["126", "52.5", "14", "14"]


def test_losses_of_the_layouts_are_one_curve() -> None:
    curves = draw_docs.recorded("losses")["losses"]
    assert len(curves) == 8 and {len(values) for values in curves.values()} == {160}
    assert max(max(values) for values in draw_docs.loss_differences(curves).values()) < 2e-6
    lines = re.findall(r'<path class="l c\d d".*? d="M(.*?)"', draw_docs.draw_losses())
    assert {line.count("L") for line in lines} == {159} and len(lines) == 8
    heights = [float(point.split()[1]) for point in lines[0].split("L")]
    first = curves["one process"]
    assert heights.index(max(heights)) == first.index(min(first)) and heights.index(min(heights)) == first.index(
        max(first)
    )


def test_losses_of_the_first_run_are_those_of_its_page() -> None:
    points, page = draw_docs.first_run_points(), (ROOT / "docs" / "first_run.md").read_text(encoding="utf-8")
    assert [iteration for iteration, _ in points["train"]] == [*range(10, 301, 10)]
    assert f"iteration 300 | lm loss value: {points['valid'][-1][1]:.6E}" in page
    (line,) = re.findall(r'<path class="l c0" d="M(.*?)"', draw_docs.draw_first_run())
    heights, losses = [float(point.split()[1]) for point in line.split("L")], [loss for _, loss in points["train"]]
    assert sorted(range(30), key=heights.__getitem__) == sorted(range(30), key=losses.__getitem__, reverse=True)


def test_bytes_of_the_dataset(tmp_path: Path) -> None:
    """The numbers of the picture are those in the files, read without our reader."""
    shown = draw_docs.dataset_files()
    with IndexedDatasetBuilder(tmp_path / "corpus", "uint16") as builder:
        for tokens in shown["tokens"]:
            builder.add_document(tokens)
    index, data = (tmp_path / "corpus.idx").read_bytes(), (tmp_path / "corpus.bin").read_bytes()
    assert shown["bytes"] == {".bin": len(data), ".idx": len(index)}
    assert index[:9] == b"MMIDIDX\0\0" and struct.unpack_from("<QBQQ", index, 9) == (1, 8, 3, 4)
    numbers = struct.unpack_from("<3i3q4q", index, 34)
    assert [*numbers] == [*shown["lengths"], *shown["starts"], *shown["documents"]]
    assert [*struct.unpack("<15H", data)] == [token for tokens in shown["tokens"] for token in tokens]


def test_files_of_the_checkpoint(tmp_path: Path) -> None:
    """The command that was recorded, of a smaller model on made-up data, writes files of the same names."""
    command = draw_docs.recorded("checkpoint")["command"].split("pretrain_gpt.py ")[1].split()
    sources = {"--vocab-file", "--merge-file", "--data-path", "--save"}
    kept = [word for at, word in enumerate(command) if word not in sources and command[at - 1] not in sources]
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "97", "--save", str(tmp_path / "ckpts")]
    done = launch([*kept, *data], ranks=4)
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "ckpts").rglob("*") if path.is_file()}
    shown = set(draw_docs.recorded("checkpoint")["files"])
    hidden = {path for path in written if Path(path).name.startswith(".")}
    assert written - hidden == {path for path in shown if "/tokenizer/" not in path}


def test_throughput_is_in_the_tables_of_measurements() -> None:
    """The numbers of each group of bars stand in one row of a table."""
    tables = [ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "RESULTS.md"]
    rows = [line for path in tables if path.is_file() for line in path.read_text(encoding="utf-8").splitlines()]
    cells = [{cell.strip() for cell in row.split("|")} for row in rows if row.startswith("|")]
    for measured in draw_docs.recorded("throughput")["measured"]:
        numbers = {f"{times:.2f}" for times in measured["times"].values()}
        assert any(numbers <= row for row in cells), measured


def test_gpu_steps_are_those_of_the_measurements() -> None:
    """Each group of bars is a row of the first GPU record. It has all contenders of the picture that the row has."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    record = text.split("### The first record")[1].split("### ")[0]
    header, _, *lines = [line for line in record.splitlines() if line.startswith("|")]
    names = [name.strip(" `") for name in header.split("|")]
    rows = {cells[1].strip(): dict(zip(names, cells, strict=True)) for cells in (line.split("|") for line in lines[:4])}
    measured = draw_docs.recorded("gpu_steps")["measured"]
    for group in measured:
        row = rows[f"{group['model']}, micro-batch {group['micro_batch']}, sequence {group['sequence']}"]
        found = {name: re.match(r" ([\d.]+) ms", row[name]) for name in draw_docs.CONTENDERS}
        assert {name: float(ms[1]) for name, ms in found.items() if ms is not None} == group["ms"]
    drawn = [float(width) for width in re.findall(r'<rect .*?width="([\d.]+)"', draw_docs.draw_gpu_steps())]
    times = [ms for group in measured for ms in group["ms"].values()]
    assert drawn == pytest.approx([ms * max(drawn) / max(times) for ms in times], rel=1e-3)

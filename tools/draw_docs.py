"""Draws the pictures of docs/ into docs/pictures/ as SVG, from the code and from docs/pictures/data/.

Run it after a change of the data, a schedule or a formula. `--output DIR` writes the pictures to another folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.config import parse_args
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megatron.layout import Layout
from megatron.pipeline_schedules import SCHEDULES
from megatron.report.pipeline_picture import ticks
from megatron.report.pipeline_timeline import Timeline, cost_of_kinds, simulate
from megatron.training.state_bytes import StateBytes, state_bytes

PICTURES_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WIDTH = 680
# Colours for light and dark pages; text and lines follow the reader's theme. A rank's later chunks are stronger.
_STYLE = """
:root{--ink:#1f2328;--soft:#59636e;--line:#c6ccd3}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#a3adb8;--line:#444c56}}
text{font:14px -apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--ink)}
.b{font-weight:600}.s{font-size:12px;fill:var(--soft)}.n{font-size:11px}
.m{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:13px}
path.a{stroke:var(--line)}path{fill:none}
.c0{--c:#3d85d8}.c1{--c:#d67d1f}.c2{--c:#3f9d5a}.c3{--c:#cf4f60}.c4{--c:#8d66d0}.c5{--c:#2a9c9c}.c6{--c:#a5764b}.c7{--c:#808a95}
rect{fill:var(--c);fill-opacity:.3;stroke:var(--c);stroke-width:1}rect.x{fill-opacity:.6}path.l{stroke:var(--c);stroke-width:1.5}path.d{stroke-width:2.5}
"""


class Svg:
    """An SVG picture whose height follows its content. Text is kept as text elements."""

    def __init__(self, title: str) -> None:
        self.title, self.parts, self.height = title, list[str](), 0.0

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        size = f'width="{width:.5g}" height="{height:.5g}"'
        self._add(f'<rect class="{kind}" x="{x:.5g}" y="{y:.5g}" {size}/>', y + height)

    def text(self, x: float, y: float, text: object, kind: str = "", anchor: str = "") -> None:
        named = f' class="{kind}"' if kind else ""
        placed = f' text-anchor="{anchor}"' if anchor else ""
        self._add(f'<text x="{x:.5g}" y="{y:.5g}"{named}{placed}>{escape(str(text))}</text>', y + 4)

    def path(self, points: Iterable[tuple[float, float]], kind: str, more: str = "") -> None:
        drawn = list(points)
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
        self._add(f'<path class="{kind}"{more} d="M{steps}"/>', max(y for _, y in drawn))

    def _add(self, part: str, bottom: float) -> None:
        self.parts.append(part)
        self.height = max(self.height, bottom)

    def legend(self, y: float, names: Sequence[tuple[str, str]], x: float = 0) -> None:
        for kind, name in names:
            self.rect(x, y - 11, 14, 12, kind)
            self.text(x + 20, y, name, "s")
            x += 36 + 6.6 * len(name)

    def whole(self) -> str:
        size = f'viewBox="-4 0 {WIDTH + 8} {self.height + 8:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self.title)}</title>'
        return "\n".join([head, f"<style>{_STYLE}</style>", *self.parts, "</svg>\n"])


GRID = Layout(16, tp=2, pp=2)
_DIVIDE = {"tp": "tensor parallel", "dp": "data parallel", "pp": "pipeline parallel"}
_WHAT = {"tp": "every layer", "dp": "the batch", "pp": "the list of layers"}


def rank_groups() -> dict[str, list[list[int]]]:
    """Returns the groups of 16 ranks at TP 2, DP 4, PP 2."""
    return {axis: [list(group) for group in GRID.groups(axis)] for axis in _DIVIDE}


def draw_rank_grid() -> str:
    svg, cell, top = Svg("The groups of 16 ranks at TP 2, DP 4, PP 2"), 72, 18.0
    for axis, groups in rank_groups().items():
        svg.text(0, top, f"{_DIVIDE[axis]}: {len(groups)} groups of {len(groups[0])} divide {_WHAT[axis]}", "b")
        for number, group in enumerate(groups):
            for rank in group:
                place = GRID.coordinates(rank)
                x, y = 80 + (place.dp * GRID.tp + place.tp) * cell + 6 * place.dp, top + 12 + place.pp * 34
                svg.rect(x, y, cell - 4, 30, f"c{number} x")
                svg.text(x + cell / 2 - 2, y + 20, rank, "", "middle")
        for stage in range(GRID.pp):
            svg.text(0, top + 32 + stage * 34, f"stage {stage}", "s")
        top += 112
    for replica in range(GRID.dp):
        svg.text(80 + (replica * 2 + 1) * cell + 6 * replica - 2, top - 16, f"replica {replica}", "s", "middle")
    return svg.whole()


_STAGES, _MICRO_BATCHES = 4, 8
_KINDS = {"F": "c0", "B": "c2", "W": "c1"}


def pipeline_steps() -> dict[str, Timeline]:
    """Simulates a step of each schedule. A stage needs one time unit for a forward pass and two for a backward."""
    steps = {}
    for name, schedule in SCHEDULES.items():
        chunks = 2 if schedule.interleaves else 1
        costs = (1.0, 1.0, 1.0) if schedule.defers_wgrads else (1 / chunks, 2 / chunks, 0.0)
        steps[name] = simulate(schedule.order, _STAGES, _MICRO_BATCHES, chunks, cost=cost_of_kinds(*costs))
    return steps


def draw_pipeline_schedules() -> str:
    svg, steps, lane, top = Svg("One step of four pipeline schedules"), pipeline_steps(), 20, 18.0
    unit = (WIDTH - 62) / max(step.end for step in steps.values())
    for name, step in steps.items():
        svg.text(0, top, name, "b")
        svg.text(110, top, f"ends after {step.end:g}; idle {step.bubble:.0%} of the work", "s")
        for span in step.spans:
            x, y = 60 + span.start * unit, top + 10 + span.rank * lane
            width = (span.end - span.start) * unit
            svg.rect(x, y, width - 1, lane - 3, _KINDS[span.action.kind] + " x" * span.action.chunk)
            if width > 15:
                svg.text(x + width / 2, y + 13, span.action.micro_batch, "n", "middle")
        for rank in range(step.ranks):
            svg.text(0, top + 23 + rank * lane, f"stage {rank}", "s")
        top += 34 + step.ranks * lane
    names = [
        ("c0", "forward"),
        ("c2", "backward"),
        ("c1", "weight gradients"),
        ("c0 x", "the stage's second chunk of layers"),
    ]
    svg.legend(top, names, 60)
    return svg.whole()


ZERO_PARAMETERS, ZERO_RANKS = 7_000_000_000, 8
_ZERO = """--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64 --max-position-embeddings 64 --bf16
--micro-batch-size 1 --train-iters 1 --lr 1e-4 --zero-stage"""


def zero_bytes() -> dict[int, StateBytes]:
    """Bytes that a rank keeps between steps at each stage, by the dry run's formula."""
    configs = {stage: parse_args([*_ZERO.split(), str(stage)], needs_data=False) for stage in range(4)}
    return {stage: state_bytes(config, ZERO_PARAMETERS, ZERO_RANKS) for stage, config in configs.items()}


def draw_zero_memory() -> str:
    svg, found = Svg("Memory of ZeRO's stages"), zero_bytes()
    unit = (WIDTH - 160) / found[0].total
    for stage, kept in found.items():
        x, y = 70.0, 8 + stage * 42.0
        svg.text(0, y + 20, f"stage {stage}")
        for kind, size in (("c0", kept.parameters), ("c1", kept.gradients), ("c2", kept.optimizer)):
            svg.rect(x, y, size * unit, 30, kind)
            if size * unit > 40:
                svg.text(x + size * unit / 2, y + 20, f"{size / 1e9:.3g}", "n", "middle")
            x += size * unit
        svg.text(x + 8, y + 20, f"{kept.total / 1e9:.3g} GB", "b")
    svg.legend(194, [("c0", "weights"), ("c1", "gradients"), ("c2", "optimizer: moments and fp32 masters")], 70)
    return svg.whole()


Curves = dict[str, list[float]]


def recorded(name: str) -> Any:
    """Content of docs/pictures/data/NAME.json, which also has the command that made it."""
    return json.loads((PICTURES_FOLDER / "data" / f"{name}.json").read_text(encoding="utf-8"))


def loss_differences(curves: Curves) -> Curves:
    """Returns each layout's absolute difference from the losses of the first curve, which is one process."""
    first, *others = curves
    return {name: [abs(a - b) for a, b in zip(curves[name], curves[first], strict=True)] for name in others}


def draw_losses() -> str:
    svg, curves = Svg("Training losses of all layouts"), recorded("losses")["losses"]
    kinds = {name: f"l c{number}" for number, name in enumerate(curves)}
    svg.text(0, 18, "training loss", "b")
    _panel(svg, 30, 210, curves, {name: f"{kind} d" for name, kind in kinds.items()})
    svg.text(0, 282, "its distance from the loss of one process", "b")
    _panel(svg, 294, 110, loss_differences(curves), kinds)
    names = [(kind.split()[1] + " x", name) for name, kind in kinds.items()]
    svg.legend(448, names[: len(names) // 2], 70)
    svg.legend(470, names[len(names) // 2 :], 70)
    return svg.whole()


def _panel(svg: Svg, top: float, height: float, curves: Curves, kinds: dict[str, str]) -> None:
    """Draws axes and a line per curve. Dashes (d) of the curves alternate, so that equal curves show all colours."""
    left, low, high = 70, min(map(min, curves.values())), max(map(max, curves.values()))
    count = len(next(iter(curves.values())))
    across, up, step = (WIDTH - left - 14) / (count - 1), height / (high - low), ticks(high - low)[1]
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        y = top + (high - number * step) * up
        svg.path([(left, y), (WIDTH, y)], "a")
        svg.text(left - 8, y + 4, f"{number * step:.3g}", "s", "end")
    for iteration in ticks(count)[1:]:
        svg.text(left + (iteration - 1) * across, top + height + 16, f"{iteration:g}", "s", "middle")
    svg.text(0, top + height + 16, "iteration", "s")
    for number, (name, values) in enumerate(curves.items()):
        points = ((left + i * across, top + (high - value) * up) for i, value in enumerate(values))
        dashes = f' stroke-dasharray="8 {8 * len(curves) - 8}" stroke-dashoffset="{-8 * number}"'
        svg.path(points, kinds[name], dashes if kinds[name].endswith(" d") else "")


def first_run_points() -> dict[str, list[tuple[int, float]]]:
    """Iterations and losses of the run on docs/first_run.md: means of ten training steps, and evaluations."""
    run = recorded("first_run")
    return {kind: [(int(iteration), loss) for iteration, loss in run[kind].items()] for kind in ("train", "valid")}


def draw_first_run() -> str:
    svg, points, left, top, low, high = Svg("Loss of the first run"), first_run_points(), 40, 40, 3.5, 7.0
    across, down = (WIDTH - left - 14) / points["train"][-1][0], 60
    place = {
        kind: [(left + i * across, top + (high - loss) * down) for i, loss in found] for kind, found in points.items()
    }
    bottom = top + (high - low) * down
    svg.text(0, 18, "loss per token", "b")
    for number in range(4, 8):
        y = top + (high - number) * down
        svg.path([(left, y), (WIDTH, y)], "a")
        svg.text(left - 8, y + 4, number, "s", "end")
    for iteration, _ in points["valid"]:
        svg.text(left + iteration * across, bottom + 16, iteration, "s", "middle")
    svg.text(0, bottom + 16, "iteration", "s")
    svg.path(place["train"], "l c0")
    for x, y in place["valid"]:
        svg.rect(x - 4, y - 4, 8, 8, "c1 x")
    svg.legend(bottom + 44, [("c0 x", "training, mean of ten steps"), ("c1 x", "validation")], left)
    return svg.whole()


_DOCUMENTS = ([12, 7, 301, 9, 511], [44, 3, 511], [8, 8, 270, 19, 2, 65, 511])


def dataset_files() -> dict[str, Any]:
    """Writes a dataset of three documents, and returns the content of its two files."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        with IndexedDatasetBuilder(prefix, "uint16") as builder:
            for document in _DOCUMENTS:
                builder.add_document(document)
        read = IndexedDataset(prefix, mmap=False)
        lengths, found = read.sequence_lengths.tolist(), [read[i].tolist() for i in range(len(read))]
        sizes = {".bin": bin_path(prefix).stat().st_size, ".idx": idx_path(prefix).stat().st_size}
        starts = [sum(lengths[:number]) * read.dtype.itemsize for number in range(len(lengths))]
        borders = read.document_indices.tolist()
        return {"tokens": found, "lengths": lengths, "starts": starts, "documents": borders, "bytes": sizes}


def draw_dataset_files() -> str:
    svg, files = Svg("The files of a dataset"), dataset_files()
    svg.text(0, 18, "corpus_text_document.bin", "m b")
    svg.text(230, 18, f"the token ids, two bytes each ({files['bytes']['.bin']} bytes)", "s")
    cell = WIDTH / sum(files["lengths"])
    x = 0.0
    for number, tokens in enumerate(files["tokens"]):
        svg.text(x, 76, f"document {number}", "s")
        svg.text(x, 92, f"from byte {files['starts'][number]}", "s")
        for token in tokens:
            svg.rect(x, 30, cell - 3, 30, f"c{number} x")
            svg.text(x + cell / 2 - 1.5, 50, token, "n", "middle")
            x += cell
    svg.text(0, 126, "corpus_text_document.idx", "m b")
    svg.text(230, 126, f"where documents begin ({files['bytes']['.idx']} bytes)", "s")
    rows = {
        "header": "MMIDIDX, version 1, type uint16, 3 sequences, 4 borders",
        "lengths, in tokens": ", ".join(map(str, files["lengths"])),
        "starts, in bytes": ", ".join(map(str, files["starts"])),
        "borders of documents": ", ".join(map(str, files["documents"])),
    }
    for number, (name, text) in enumerate(rows.items()):
        svg.text(16, 150 + 22 * number, name, "s")
        svg.text(200, 150 + 22 * number, text, "m")
    svg.text(0, 254, "corpus_text_document.meta.json", "m b")
    svg.text(16, 276, "fingerprint of the tokenizer, number of documents and tokens, checksums", "s")
    return svg.whole()


_MEANINGS = {
    "exit_reason.json": "why the run ended",
    "latest_checkpointed_iteration.txt": "the iteration that --load takes",
    "manifest.json": "checksums, and where each tensor lies",
    "model_optim_rng.pt": "weights of a tensor-parallel rank",
    "model_optim_rng.state.json": "counters, schedule, random states",
    "distrib_optim_00000.pt": "a half of the optimizer's state",
    "distrib_optim_00001.pt": "the other half",
    "tokenizer.json": "the run's tokenizer",
}


def draw_checkpoint_files() -> str:
    svg, files, shown, y = Svg("The files of a checkpoint"), recorded("checkpoint")["files"], set[str](), 18.0
    for path, size in files.items():
        *folders, name = path.split("/")
        for depth in range(1, len(folders) + 1):
            folder = "/".join(folders[:depth])
            if folder not in shown:
                shown.add(folder)
                svg.text(20 * (depth - 1), y, f"{folders[depth - 1]}/", "m b")
                y += 22
        svg.text(20 * len(folders), y, name, "m")
        svg.text(400, y, _size(size), "s", "end")
        svg.text(420, y, _MEANINGS.get(name, ""), "s")
        y += 22
    return svg.whole()


def _size(size: int) -> str:
    return f"{size} B" if size < 1000 else f"{size / 1000:.0f} kB"


_BARS_LEFT = 190
Bars = dict[str, tuple[str, float]]
"""Names of bars, each with its kind and value."""


def _bars(svg: Svg, rows: Iterable[tuple[str, str, Bars]], value: str) -> tuple[float, float]:
    """Draws groups of bars in one scale, each below a title and a remark. Returns the bottom and the scale."""
    groups, y = list(rows), 18.0
    unit = (WIDTH - _BARS_LEFT - 40) / max(length for _, _, bars in groups for _, length in bars.values())
    for title, remark, bars in groups:
        svg.text(0, y, title, "b")
        svg.text(WIDTH, y, remark, "s", "end")
        for number, (name, (kind, length)) in enumerate(bars.items()):
            top = y + 10 + 24 * number
            svg.text(_BARS_LEFT - 10, top + 15, name, "s", "end")
            svg.rect(_BARS_LEFT, top, length * unit, 19, kind)
            svg.text(_BARS_LEFT + length * unit + 6, top + 14, value.format(length), "n")
        y += 40 + 24 * len(bars)
    return y, unit


def draw_throughput() -> str:
    svg, rows = Svg("Throughput beside peers"), list[tuple[str, str, Bars]]()
    for row in recorded("throughput")["measured"]:
        peers = enumerate(row["times"].items())
        rows.append((row["what"], row["where"], {peer: (f"c{number}", times) for number, (peer, times) in peers}))
    y, unit = _bars(svg, rows, "{:.2f}x")
    svg.path([(_BARS_LEFT + unit, 4), (_BARS_LEFT + unit, y - 24)], "a")
    svg.text(_BARS_LEFT + unit, y - 8, "1x: as fast as the peer", "s", "middle")
    return svg.whole()


CONTENDERS = {
    "ours": ("this framework", "c0 x"),
    "plain model, compiled": ("plain torch, compiled", "c1"),
    "llm.c (cuDNN)": ("llm.c", "c2"),
    "transformers, compiled": ("transformers, compiled", "c3"),
}


def draw_gpu_steps() -> str:
    svg, rows = Svg("Training steps on one H200 beside peers"), list[tuple[str, str, Bars]]()
    for row in recorded("gpu_steps")["measured"]:
        bars = {CONTENDERS[name][0]: (CONTENDERS[name][1], ms) for name, ms in row["ms"].items()}
        rows.append((row["model"], f"micro-batch {row['micro_batch']}, sequence {row['sequence']}", bars))
    y, _ = _bars(svg, rows, "{:.1f}")
    svg.text(_BARS_LEFT, y - 16, "milliseconds per step: a shorter bar is faster", "s")
    return svg.whole()


_DRAWN: tuple[Callable[[], str], ...] = (
    *(draw_rank_grid, draw_pipeline_schedules, draw_zero_memory, draw_losses, draw_first_run),
    *(draw_dataset_files, draw_checkpoint_files, draw_throughput, draw_gpu_steps),
)
PICTURES = {draw.__name__.removeprefix("draw_"): draw for draw in _DRAWN}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURES_FOLDER, metavar="DIR", help="folder of the pictures")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        path = output / f"{name}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    from megatron.utils.command_line import run_tool

    sys.exit(run_tool("draw_docs.py", main))

"""tools/results_table.py: samples/s and perplexity of runs, beside published ones."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.report.picture import write_picture
from megatron.report.results import Published, SizeResult, draw_bars, read_published, row_of_run
from megatron.utils.command_line import Parser, run_tool
from megatron.utils.log import print_line

NAME = "results_table.py"
_COLUMNS = ("size", "devices", "samples/s", "PPL", "steps", "measured")


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool("error", lambda: _show(build_parser().parse_known_flags(argv)))


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="A table of runs: size, devices, samples/s, perplexity, steps.")
    parser.add_argument(
        "--run", nargs=3, action="append", required=True, metavar=("SIZE", "DEVICES", "FILE"),
        help="a run and its --metrics-jsonl file; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--published", type=Path, metavar="FILE.json", help="published rows, as in examples/gpt2_8p/published.json"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="also draw the table (needs matplotlib)")
    return parser


def _show(arguments: argparse.Namespace) -> None:
    if arguments.output is not None and arguments.output.suffix.lower() != ".png":
        raise ConfigError(f"--output {arguments.output}: only PNG is written; give a name that ends in .png")
    published = Published("", ()) if arguments.published is None else read_published(arguments.published)
    rows = [*(row_of_run(size, devices, Path(file)) for size, devices, file in arguments.run), *published.rows]
    print(render(rows, published.source))
    if arguments.output is not None:
        write_picture(lambda: draw_bars(rows, published.source), arguments.output)
        print_line(f"{arguments.output}: the table as a picture")


def render(rows: Sequence[SizeResult], source: str) -> str:
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.append(
        "samples/s: the median of the logged intervals. PPL: perplexity per token in the last evaluation of the run's "
        "validation split; other texts or vocabularies give other values."
    )
    return "\n".join([*lines, *([f"published: {source}."] if source else [])])


def _cells(row: SizeResult) -> tuple[str, ...]:
    return (
        row.size,
        row.devices,
        "-" if row.samples_per_second is None else f"{row.samples_per_second:.4g}",
        "-" if row.perplexity is None else f"{row.perplexity:.5g}",
        "-" if row.steps is None else str(row.steps),
        "published" if row.published else "here",
    )

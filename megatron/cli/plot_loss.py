"""tools/plot_loss.py: loss curves of one or several runs, as a PNG or in the terminal."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.report.loss_curves import LoggedRun, draw_curves, draw_in_terminal, read_log, read_metrics
from megatron.report.picture import write_picture
from megatron.utils.command_line import Parser, integer, run_tool
from megatron.utils.log import print_line

EXAMPLES = """examples:
  python tools/plot_loss.py --metrics-jsonl metrics.jsonl
  python tools/plot_loss.py --metrics-jsonl a/metrics.jsonl b/metrics.jsonl --log theirs.log --output loss.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool("error", lambda: _plot(build_parser().parse_known_flags(argv)))


def build_parser() -> Parser:
    parser = Parser(
        prog="plot_loss.py",
        description="Draws the loss curves of runs: one run in the terminal, any number as a PNG.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: dict[str, Any] = {"type": Path, "nargs": "+", "default": [], "metavar": "FILE"}
    parser.add_argument(
        "--metrics-jsonl", **several, help="files that runs wrote with --metrics-jsonl (numbers in full)"
    )
    parser.add_argument("--log", **several, help="logs of runs (any --log-format), or of Megatron-LM")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the picture (needs matplotlib)")
    parser.add_argument("--value", default="lm_loss", help="number to draw, by its key in the metrics file (lm_loss)")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="names of the runs in the legend (their files)")
    parser.add_argument(
        "--width", type=integer(10, 10_000), default=72, metavar="N", help="columns in the terminal (72)"
    )
    parser.add_argument("--height", type=integer(3, 1000), default=16, metavar="N", help="rows in the terminal (16)")
    return parser


def _plot(arguments: argparse.Namespace) -> None:
    count = len(arguments.metrics_jsonl) + len(arguments.log)
    if count == 0:
        raise ConfigError("--metrics-jsonl and --log: neither is given; give the metrics file or the log of a run")
    if arguments.output is None and count > 1:
        raise ConfigError(f"the terminal shows one run, and {count} are given; add --output FILE.png")
    if arguments.output is not None and arguments.output.suffix.lower() != ".png":
        raise ConfigError(f"--output {arguments.output}: only PNG is written; give a name that ends in .png")
    if arguments.names and len(arguments.names) != count:
        raise ConfigError(f"--names: {len(arguments.names)} names for {count} runs; give one name per run")
    runs = [read_metrics(path, arguments.value) for path in arguments.metrics_jsonl]
    runs += [read_log(path, arguments.value) for path in arguments.log]
    if arguments.names:
        runs = [LoggedRun(name, run.curves) for name, run in zip(arguments.names, runs, strict=True)]
    if arguments.output is not None:
        write_picture(lambda: draw_curves(runs, arguments.value), arguments.output)
        print_line(f"{arguments.output}: {arguments.value} of {', '.join(run.name for run in runs)}")
    else:
        plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        print(
            draw_in_terminal(
                runs[0], width=arguments.width, height=arguments.height, plain=plain, title=arguments.value
            )
        )

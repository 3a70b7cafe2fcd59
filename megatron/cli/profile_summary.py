"""tools/profile_summary.py: prints how traced steps spent their time."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.training.profiling.trace_summary import read_trace, summarise
from megatron.utils.command_line import Parser, integer, run_tool

NAME = "profile_summary.py"


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _print_summaries(build_parser().parse_known_flags(argv)))


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="Prints for each trace a table of how training steps spent their time.")
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="trace files, or the folder given as --profile-dir")
    parser.add_argument("--top", type=integer(0), default=10, metavar="N", help="number of operations to list (10)")
    return parser


def _print_summaries(arguments: argparse.Namespace) -> None:
    for path in _files(arguments.traces):
        print(f"{path}\n{summarise(read_trace(path), arguments.top).table()}")


def _files(names: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for name in names:
        path = Path(name)
        inside = sorted(path.glob("[!.]*.trace.json*")) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{name}: the folder holds no trace (*.trace.json.gz); train with --profile first")
        found += inside
    return found

"""The command line of tools/draw_pipeline.py: draws a recorded or a simulated step and prints its bubble."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.pipeline_parallel.draw import draw_timeline
from megatron.pipeline_parallel.pass_recorder import read_timelines
from megatron.pipeline_parallel.schedules import SCHEDULES
from megatron.pipeline_parallel.simulate import cost_of_kinds, simulate
from megatron.pipeline_parallel.timeline import Timeline
from megatron.utils.command_line import Parser, integer, run_tool

NAME = "draw_pipeline.py"


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _draw(build_parser().parse_known_flags(argv)))


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="Draws when each pass of a pipelined step ran, with the bubble.")
    parser.add_argument("--trace", metavar="DIR", help="what a run with --pipeline-trace DIR wrote")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), help="simulate this schedule instead")
    parser.add_argument("--stages", type=integer(1), default=4, metavar="N", help="simulated ranks (4)")
    parser.add_argument("--micro-batches", type=integer(1), default=8, metavar="N", help="simulated (8)")
    parser.add_argument("--chunks", type=integer(1), default=1, metavar="N", help="simulated stages a rank (1)")
    parser.add_argument("--output", required=True, metavar="FILE.png", help="the picture")
    return parser


def _draw(arguments: argparse.Namespace) -> None:
    if (arguments.trace is None) == (arguments.schedule is None):
        raise ConfigError("--trace and --schedule: give one of them, a run's times or what to simulate")
    if arguments.trace is not None:
        step = read_timelines(Path(arguments.trace))[-1]
        source = f"measured, {step.end:.3f} s"
    else:
        step = _simulated(arguments.schedule, arguments.stages, arguments.micro_batches, arguments.chunks)
        source = f"simulated, {arguments.schedule}, equal stages"
    title = (
        f"{source}; {step.ranks} stages, {step.micro_batches} micro-batches, {step.chunks} chunks a rank; bubble "
        f"{step.bubble:.1%} of the work, {'(p-1)/(3 m)' if step.defers_wgrads else '(p-1)/(m v)'} is "
        f"{step.theoretical_bubble:.1%}"
    )
    try:
        draw_timeline(step, title, arguments.output)
    except ImportError:
        raise ConfigError(
            f"--output {arguments.output}: drawing needs pillow, which is not installed for {sys.executable}; "
            f"{sys.executable} -m pip install pillow"
        ) from None
    print(f"{arguments.output}: {title}")


def _simulated(schedule: str, ranks: int, micro_batches: int, chunks: int) -> Timeline:
    if (chunks > 1) != (schedule == "interleaved"):
        raise ConfigError(f"--chunks {chunks}: --schedule interleaved, and it alone, has several chunks a rank")
    if schedule == "interleaved" and micro_batches % ranks:
        raise ConfigError(f"--micro-batches {micro_batches}: interleaved needs a multiple of --stages {ranks}")
    backward = 1 if schedule == "zero-bubble" else 2  # without the weight gradients, or with them
    return simulate(SCHEDULES[schedule], ranks, micro_batches, chunks, cost=cost_of_kinds(1, backward, 1))

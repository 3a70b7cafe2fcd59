"""tools/draw_pipeline.py: a recorded or simulated step of a pipeline as a picture."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.pipeline_schedules import SCHEDULES, fills_groups, schedule_of
from megatron.report.pipeline_picture import draw_step
from megatron.report.pipeline_timeline import Timeline, cost_of_kinds, read_timelines, simulate
from megatron.utils.command_line import Parser, integer, run_tool
from megatron.utils.log import print_line

NAME = "draw_pipeline.py"
_MOST_PASSES = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _draw(build_parser().parse_known_flags(argv)))


def build_parser() -> Parser:
    parser = Parser(
        prog=NAME,
        description="Draws the times of all forward and backward passes of one pipelined step, and prints the bubble.",
    )
    parser.add_argument("--trace", metavar="DIR", help="directory that a run with --pipeline-trace DIR wrote")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), help="simulate this schedule, instead of --trace")
    parser.add_argument("--stages", type=integer(1, 1024), default=4, metavar="N", help="simulated ranks (4)")
    parser.add_argument("--micro-batches", type=integer(1, 4096), default=8, metavar="N", help="micro-batches (8)")
    parser.add_argument("--chunks", type=integer(1, 64), default=1, metavar="N", help="simulated stages per rank (1)")
    parser.add_argument(
        "--group", type=integer(1, 4096), metavar="N", help="simulated micro-batches per group (the value of --stages)"
    )
    parser.add_argument("--output", required=True, metavar="FILE.png", help="the picture to write")
    return parser


def _draw(arguments: argparse.Namespace) -> None:
    if (arguments.trace is None) == (arguments.schedule is None):
        raise ConfigError(
            "--trace and --schedule: give one of them: --trace for a run's times, --schedule for a simulation"
        )
    if arguments.trace is not None:
        step = read_timelines(Path(arguments.trace))[-1]
        source = f"measured, {step.end:.3f} s"
    else:
        step = _simulated(arguments)
        source = f"simulated, {arguments.schedule}, equal stages"
    title = (
        f"{source}; {step.ranks} stages, {step.micro_batches} micro-batches, {step.chunks} chunks per rank; bubble "
        f"{step.bubble:.1%} of the work, {'(p-1)/(3 m)' if step.defers_wgrads else '(p-1)/(m v)'} is "
        f"{step.theoretical_bubble:.1%}"
    )
    try:
        draw_step(step, title, arguments.output, measured=arguments.trace is not None)
    except ImportError:
        raise ConfigError(
            f"--output {arguments.output}: drawing needs pillow, which is not installed for {sys.executable}; "
            f"run {sys.executable} -m pip install pillow (the extra 'plot')"
        ) from None
    print_line(f"{arguments.output}: {title}")


def _simulated(arguments: argparse.Namespace) -> Timeline:
    schedule, ranks, micro_batches = arguments.schedule, arguments.stages, arguments.micro_batches
    record = SCHEDULES[schedule]
    chunks, group = arguments.chunks, arguments.group
    if (chunks > 1) != record.interleaves:
        raise ConfigError(
            f"--chunks {chunks}: --schedule interleaved needs at least 2 chunks per rank, other schedules have 1"
        )
    if group is not None and not record.interleaves:
        raise ConfigError(f"--group {group}: only --schedule interleaved has groups; remove the flag")
    if record.interleaves and not fills_groups(micro_batches, group or ranks, ranks):
        raise ConfigError(
            f"--micro-batches {micro_batches}: --schedule interleaved takes groups of {group or ranks} micro-batches, "
            f"and a group needs at least --stages {ranks}; give a multiple of {max(group or ranks, ranks)}"
        )
    if 2 * ranks * micro_batches * chunks > _MOST_PASSES:
        raise ConfigError(
            f"--stages {ranks} --micro-batches {micro_batches} --chunks {chunks}: a picture shows at most "
            f"{_MOST_PASSES} passes; give fewer"
        )
    backward = 1 if record.defers_wgrads else 2  # time units of a backward pass, without or with the weight gradients
    return simulate(schedule_of(schedule, group), ranks, micro_batches, chunks, cost=cost_of_kinds(1, backward, 1))

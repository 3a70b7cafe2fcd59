"""tools/draw_pipeline.py: the picture of a schedule, from a run's own times or by simulation, with its bubble."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.config.tool import Parser, integer, run_tool
from megatron.errors import ConfigError
from megatron.pipeline_parallel.draw import draw_png
from megatron.pipeline_parallel.schedules import SCHEDULES
from megatron.pipeline_parallel.simulate import Span, bubble, cost_of_kinds, simulate, theoretical_bubble
from megatron.pipeline_parallel.trace import read_trace

NAME = "draw_pipeline.py"


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _draw(sys.argv[1:] if argv is None else argv))


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="Draws when each pass of a pipelined step ran, with the bubble.")
    parser.add_argument("--trace", metavar="DIR", help="what a run with --pipeline-trace DIR wrote")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), help="simulate this schedule instead")
    parser.add_argument("--stages", type=integer(1), default=4, metavar="N", help="simulated ranks (4)")
    parser.add_argument("--micro-batches", type=integer(1), default=8, metavar="N", help="simulated (8)")
    parser.add_argument("--chunks", type=integer(1), default=1, metavar="N", help="simulated stages a rank (1)")
    parser.add_argument("--output", required=True, metavar="FILE.png", help="the picture")
    return parser


def _draw(argv: Sequence[str]) -> None:
    arguments = build_parser().parse_known_flags(argv)
    if (arguments.trace is None) == (arguments.schedule is None):
        raise ConfigError("--trace and --schedule: give one of them, a run's times or what to simulate")
    spans: Sequence[Span]
    if arguments.trace is not None:
        trace = read_trace(Path(arguments.trace))
        spans, ranks, micro_batches, chunks = trace.spans, trace.ranks, trace.micro_batches, trace.chunks
        source = f"measured, {max(span.end for span in spans):.3f} s"
    else:
        ranks, micro_batches, chunks = arguments.stages, arguments.micro_batches, arguments.chunks
        spans = _simulated(arguments.schedule, ranks, micro_batches, chunks)
        source = f"simulated, {arguments.schedule}, equal stages"
    queued = any(span.action.kind == "W" for span in spans)
    expected = theoretical_bubble(ranks, micro_batches, chunks, queued=queued)
    found = bubble(spans, ranks)
    title = (
        f"{source}; {ranks} stages, {micro_batches} micro-batches, {chunks} chunks a rank; bubble {found:.1%} of the "
        f"work, {'(p-1)/(3 m)' if queued else '(p-1)/(m v)'} is {expected:.1%}"
    )
    try:
        draw_png(spans, ranks, title, arguments.output)
    except ImportError:
        raise ConfigError(
            f"--output {arguments.output}: drawing needs pillow, which is not installed for {sys.executable}; "
            f"{sys.executable} -m pip install pillow"
        ) from None
    print(f"{arguments.output}: {title}")


def _simulated(schedule: str, ranks: int, micro_batches: int, chunks: int) -> list[Span]:
    if (chunks > 1) != (schedule == "interleaved"):
        raise ConfigError(f"--chunks {chunks}: --schedule interleaved, and it alone, has several chunks a rank")
    if schedule == "interleaved" and micro_batches % ranks:
        raise ConfigError(f"--micro-batches {micro_batches}: interleaved needs a multiple of --stages {ranks}")
    waits = schedule == "zero-bubble"
    return simulate(SCHEDULES[schedule], ranks, micro_batches, chunks, cost=cost_of_kinds(1, 1 if waits else 2, 1))

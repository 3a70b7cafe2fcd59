"""The command line of tools/check_layout.py: trains a configuration in its layout and in one process, and compares."""

import argparse
import sys
import traceback
from collections.abc import Sequence

from megatron.errors import ConfigError, MegatronError
from megatron.training.exit import as_megatron_error, in_one_line
from megatron.utils.command_line import Parser, integer, run_tool
from megatron.utils.numerals import LARGEST_WORLD, MOST_PROCESSES, real_number
from megatron.utils.process import usable_cpus

NAME = "check_layout.py"
_LARGEST = 1_000_000
FAULT_NAMES = (
    *("no-gradient-reduction", "no-replica-sum", "one-weight-off", "lost-token", "last-token"),
    *("own-chunk-attention", "last-chunk", "last-stage", "wide-window", "unscaled-positions"),
)


class CheckError(MegatronError):
    """The check ended with an unexpected exception, not with a MegatronError."""

    exit_code = 2


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def build_parser() -> Parser:
    parser = Parser(
        prog=NAME,
        usage="%(prog)s [options] -- FLAGS OF THE TRAINING",
        description="Compares a training in a parallel layout with the same training in one process. The configuration "
        "after -- is trained for a few steps in both ways, on the CPU in fp64 without dropout. Losses, every gradient, "
        "gradient norms, weights and an evaluation are compared. In the loss, each token has another weight. "
        "Exit code 0: equal within the tolerance; 1: different; other codes: nothing was compared.",
    )
    parser.add_argument("--steps", type=integer(1, 1_000_000), default=3, metavar="N", help="optimizer steps (3)")
    parser.add_argument(
        "--tolerance", type=_positive, default=1e-10, metavar="X", help="largest relative difference (1e-10)"
    )
    parser.add_argument(
        "--ranks",
        type=integer(1, MOST_PROCESSES),
        metavar="N",
        help="processes of the layout; unset: the fewest that hold it, with two data-parallel ranks up to eight",
    )
    parser.add_argument(
        "--cluster",
        type=integer(2, LARGEST_WORLD),
        metavar="N",
        help="train nothing; prove that N ranks with these flags do not hang over nccl. One rank of each kind records "
        "its communication from start to stop, with a save and a load, and the record is printed. Exit code 0: proved; "
        "1: the ranks would hang",
    )
    parser.add_argument(
        "--workers",
        type=integer(1, MOST_PROCESSES),
        metavar="N",
        help="processes at a time for --cluster (one for each CPU)",
    )
    parser.add_argument("--full", action="store_true", help="never shrink the model, even if the check takes long")
    parser.add_argument("--script", metavar="FILE.py", help="a pretrain script of your own (pretrain_gpt.py)")
    parser.add_argument("--plant", choices=FAULT_NAMES, help="inject this fault, to see that it is found (exit code 1)")
    parser.add_argument(
        "--timeout-minutes",
        type=_positive,
        default=30.0,
        metavar="X",
        help="time limit of each of the two runs, in minutes (30)",
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser


def _of_training(options: argparse.Namespace) -> str | None:
    """Returns the first given option that has no effect with --cluster, which trains nothing; None if there is none."""
    unset = build_parser().parse_known_flags([])
    names = ("steps", "tolerance", "ranks", "full", "plant", "timeout_minutes")
    changed = (name for name in names if getattr(options, name) != getattr(unset, name))
    return next((f"--{name.replace('_', '-')}" for name in changed), None)


def _positive(text: str) -> float:
    try:
        value = real_number(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and of at most {_LARGEST}")
    return value


def _run(argv: list[str]) -> int:
    if "--" not in argv and not {"-h", "--help"} & set(argv):
        raise ConfigError("the flags of the training come after --, as in: check_layout.py -- --num-layers 4 ...")
    cut = argv.index("--") if "--" in argv else len(argv)
    options = build_parser().parse_known_flags(argv[:cut])
    if options.cluster is not None and (given := _of_training(options)):
        raise ConfigError(f"--cluster {options.cluster}: trains nothing, so {given} has no effect; remove {given}")
    if options.cluster is None and options.workers is not None:
        raise ConfigError(f"--workers {options.workers}: has no effect without --cluster N; remove --workers")
    try:  # imported here, so that `--help` does not load torch
        from megatron.compat.deepspeed_file.source import deepspeed_assignments
        from megatron.interop.source import OTHER_PROGRAMS

        if options.cluster is not None:
            from megatron.prove.order.prove import prove

            # Workers are forked processes, and forking is not safe on macOS.
            cpus = usable_cpus() if sys.platform == "linux" else 1
            return prove(
                options.cluster,
                options.script,
                argv[cut + 1 :],
                workers=options.workers or cpus,
                source=OTHER_PROGRAMS,
                other_file=deepspeed_assignments,
            )
        from megatron.prove.check_layout.check import compare_with_one_process

        return compare_with_one_process(options, argv[cut + 1 :], OTHER_PROGRAMS, deepspeed_assignments)
    except BrokenPipeError:
        raise
    except Exception as error:
        if options.traceback:
            print(getattr(error, "calls", "") or traceback.format_exc(), file=sys.stderr)
        told = as_megatron_error(error)
        if isinstance(told, MegatronError):
            raise told from None
        raise CheckError(f"{in_one_line(error)}; --traceback shows the calls that led to the error") from None

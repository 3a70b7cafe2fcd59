"""The command line of tools/check_layout.py: trains a configuration at its layout and by one process, and compares."""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, MegatronError, ReplicaError
from megatron.training.check_layout.errors import CheckError, in_one_line
from megatron.training.check_layout.script import load_script, train_rank
from megatron.training.exit import as_megatron_error
from megatron.utils.command_line import Parser, integer, run_tool

if TYPE_CHECKING:  # `--help` loads no torch
    from megatron.config import RunConfig
    from megatron.training.check_layout.outcome import Outcome

NAME = "check_layout.py"
FAULT_NAMES = (
    "no-gradient-reduction",
    "no-replica-sum",
    "one-weight-off",
    "lost-token",
    "last-token",
    "own-chunk-attention",
    "last-chunk",
    "last-stage",
    "wide-window",
    "unscaled-positions",
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def build_parser() -> Parser:
    parser = Parser(
        prog=NAME,
        usage="%(prog)s [options] -- FLAGS OF THE TRAINING",
        description="Shows that a layout trains what one process trains: the configuration behind -- runs a few steps "
        "at its layout and by one process, on the CPU in fp64 without dropout, and losses, every gradient, gradient "
        "norms, weights and an evaluation are compared, every token with a weight of its own. Exit code 0: equal "
        "within the tolerance; 1: not; other codes: nothing could be compared.",
    )
    parser.add_argument("--steps", type=integer(1), default=3, metavar="N", help="optimizer steps (3)")
    parser.add_argument("--tolerance", type=_positive, default=1e-10, metavar="X", help="relative (1e-10)")
    parser.add_argument(
        "--ranks",
        type=integer(1),
        metavar="N",
        help="processes of the layout; unset: the fewest that hold it, with two data-parallel ranks up to eight",
    )
    parser.add_argument("--full", action="store_true", help="never shrink the model, however long it takes")
    parser.add_argument("--script", metavar="FILE.py", help="a pretrain script of your own (pretrain_gpt.py)")
    parser.add_argument("--plant", choices=FAULT_NAMES, help="plant this fault, to see that it is found (exit code 1)")
    parser.add_argument(
        "--timeout-minutes", type=_positive, default=30.0, metavar="X", help="longest time of one of the runs (30)"
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error comes from")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _run(argv: list[str]) -> int:
    if "--" not in argv and not {"-h", "--help"} & set(argv):
        raise ConfigError("the flags of the training come after --, as in: check_layout.py -- --num-layers 4 ...")
    cut = argv.index("--") if "--" in argv else len(argv)
    options = build_parser().parse_known_flags(argv[:cut])
    try:
        return _check(options, argv[cut + 1 :])
    except BrokenPipeError:
        raise
    except Exception as error:
        if options.traceback:
            print(getattr(error, "calls", "") or traceback.format_exc(), file=sys.stderr)
        told = as_megatron_error(error)
        if isinstance(told, MegatronError):
            raise told from None
        raise CheckError(f"{in_one_line(error)}; --traceback shows the calls that led there") from None


def _check(options: argparse.Namespace, argv: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="check-layout-") as folder:
        check = _prepare(options, argv, Path(folder))
        for line in check.introduction:
            print(line, flush=True)
        at_layout = check.train(check.config, check.ranks, fault=options.plant)
        alone = check.train(check.alone, 1)
    return check.report(at_layout, alone)


@dataclass(frozen=True)
class LayoutCheck:
    options: argparse.Namespace
    script: ModuleType
    config: RunConfig
    alone: RunConfig
    ranks: int
    introduction: list[str]

    def train(self, config: RunConfig, ranks: int, *, fault: str | None = None) -> Outcome | ReplicaError:
        from megatron.training.check_layout.outcome import RankOutcome, join
        from megatron.training.check_layout.ranks import run_ranks

        def body(rank: int) -> bytes:
            outcome = train_rank(self.script, config, rank, ranks, steps=self.options.steps, fault=fault)
            return outcome.to_bytes()

        results = run_ranks(ranks, body, timedelta(minutes=self.options.timeout_minutes))
        try:
            return join([RankOutcome.from_bytes(result) for result in results])
        except ReplicaError as error:
            return error

    def report(self, got: Outcome | ReplicaError, expected: Outcome | ReplicaError) -> int:
        """Prints how far the layout is from one process, and the verdict; returns the exit code."""
        from megatron.training.check_layout.outcome import differences
        from megatron.training.check_layout.report import other_samples, table, verdict

        if isinstance(expected, ReplicaError):
            raise expected
        if isinstance(got, ReplicaError):
            print(f"DIFFERENT: {got}")
            return 1
        if (cause := other_samples(got, expected, self.config.data)) is not None:
            print(f"DIFFERENT: {cause}")
            return 1
        found = differences(got, expected)
        print(table(found))
        equal, line = verdict(found, self.options.tolerance, self.ranks)
        print(line)
        return 0 if equal else 1


def _prepare(options: argparse.Namespace, argv: list[str], folder: Path) -> LayoutCheck:
    from megatron.training.check_layout.settings import alone, changes, is_large, ranks_of, reproducible, shrink
    from megatron.training.initialize import tokenizer_of
    from megatron.training.settings import read_settings

    script = load_script(options.script)
    given = read_settings(argv, needs_data=options.script is None)
    ranks = ranks_of(given, options.ranks)
    config = reproducible(given, ranks, options.steps, folder / "cache")
    tokenizer = tokenizer_of(config, required=options.script is None)
    vocab_size = tokenizer.vocab_size if tokenizer is not None else config.tokenizer.vocab_size or 0
    introduction = [
        f"{_layout(config, ranks)} on {ranks} ranks, and one process: {options.steps} steps on the CPU, in fp64, "
        "without dropout, at a constant learning rate, every token's loss with a weight of its own"
    ]
    if options.plant:
        introduction.append(f"planted on purpose: {options.plant}")
    config = _with_kernels_of_a_cpu(config, introduction)
    if is_large(config, ranks, vocab_size) and not options.full:
        small = shrink(config, ranks)
        introduction.append(f"shrunk to be quick (--full runs it as it is): {', '.join(changes(config, small))}")
        config = small
    return LayoutCheck(options, script, config, alone(config), ranks, introduction)


def _layout(config: RunConfig, ranks: int) -> str:
    parallel = config.parallel
    sizes = {
        "tensor": parallel.tensor_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "expert": parallel.expert_model_parallel_size,
    }
    sizes["data"] = ranks // parallel.model_parallel_size
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return " x ".join(shown)


def _with_kernels_of_a_cpu(config: RunConfig, introduction: list[str]) -> RunConfig:
    """The kernels of the run where they can compute fp64; the introduction says what replaces native ones."""
    from megatron.ops.select import resolve

    asked, kernels = config.kernels.kernels, replace(config.kernels, cuda_graphs=False)
    if asked.split(",")[0].strip() == "native":
        kernels = replace(kernels, kernels=asked.replace("native", "auto", 1))
        introduction.append(f"--kernels {asked} is taken as {kernels.kernels}: the native kernels know no fp64")
    table = resolve(kernels.spec, "cpu", attention=kernels.attention)
    if any(choice.backend == "native" for choice in table.choices):
        introduction.append(
            "this compares layouts, not kernels: in fp64 a fallback runs in place of each native one (docs/kernels.md "
            "says what compares those)"
        )
    return replace(config, kernels=kernels)

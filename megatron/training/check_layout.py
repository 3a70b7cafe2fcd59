"""tools/check_layout.py: a configuration trained a few steps at its layout and by one process, and compared."""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.config.tool import Parser, integer, run_tool
from megatron.errors import ConfigError, ReplicaError

if TYPE_CHECKING:  # `--help` loads no torch
    from megatron.config import RunConfig
    from megatron.training.outcome import Difference, Outcome

NAME = "check_layout.py"
PLANTED = ("no-gradient-reduction", "no-replica-sum", "one-weight-off", "lost-token")


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _check(list(sys.argv[1:] if argv is None else argv)))


def build_parser() -> Parser:
    parser = Parser(
        prog=NAME,
        usage="%(prog)s [options] -- FLAGS OF THE TRAINING",
        description="Shows that a layout trains what one process trains: the configuration behind -- runs a few steps "
        "at its layout and by one process, on the CPU in fp64 without dropout, and losses, every gradient, gradient "
        "norms and weights are compared. Exit code 0: equal within the tolerance; 1: not.",
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
    parser.add_argument(
        "--plant", choices=PLANTED, help="make this mistake on purpose, to see that it is found (exit code 1)"
    )
    parser.add_argument(
        "--timeout-minutes", type=_positive, default=30.0, metavar="X", help="longest time of one of the runs (30)"
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _check(argv: list[str]) -> int:
    if "--" not in argv and not {"-h", "--help"} & set(argv):
        raise ConfigError("the flags of the training come after --, as in: check_layout.py -- --num-layers 4 ...")
    cut = argv.index("--") if "--" in argv else len(argv)
    options = build_parser().parse_known_flags(argv[:cut])
    with tempfile.TemporaryDirectory(prefix="check-layout-") as folder:
        check = _prepare(options, argv[cut + 1 :], Path(folder))
        for line in check.introduction:
            print(line, flush=True)
        return check.report(check.run(check.config, check.ranks), check.run(check.alone, 1, plant=False))


@dataclass(frozen=True)
class LayoutCheck:
    options: argparse.Namespace
    script: ModuleType
    config: RunConfig
    alone: RunConfig
    ranks: int
    introduction: list[str]
    folder: Path

    def run(self, config: RunConfig, ranks: int, *, plant: bool = True) -> Outcome | ReplicaError:
        from megatron.training.local_ranks import run_ranks
        from megatron.training.outcome import RankOutcome, join

        folder = self.folder / f"{ranks}-ranks"
        planted = self.options.plant if plant else None

        def body(rank: int) -> None:
            _train(self.script, config, rank, ranks, self.options.steps, planted, folder)

        run_ranks(ranks, body, folder, timedelta(minutes=self.options.timeout_minutes))
        try:
            return join([RankOutcome.read(folder / f"outcome_{rank}.pt") for rank in range(ranks)])
        except ReplicaError as error:
            return error

    def report(self, got: Outcome | ReplicaError, expected: Outcome | ReplicaError) -> int:
        from megatron.training.outcome import differences

        if isinstance(expected, ReplicaError):
            raise expected
        if isinstance(got, ReplicaError):
            print(f"DIFFERENT: {got}")
            return 1
        found = differences(got, expected)
        print("largest relative difference of")
        for kind in dict.fromkeys(difference.kind for difference in found):
            some = [difference for difference in found if difference.kind == kind]
            worst = max(some, key=lambda difference: _size(difference))
            print(f"  {kind:<14} {worst.size:8.1e}  ({worst.where}; {len(some)} compared)")
        return self._verdict(found)

    def _verdict(self, found: list[Difference]) -> int:
        tolerance = self.options.tolerance
        off = [difference for difference in found if not _size(difference) <= tolerance]
        if not off:
            print(f"EQUAL within {tolerance:g}: {self.ranks} ranks train what one process trains")
            return 0
        # A gradient is nearer to the cause than a weight, and a weight than a loss.
        tensors = [difference for difference in off if difference.kind in ("gradient", "weight")]
        first = (tensors or off)[0]
        print(
            f"DIFFERENT beyond {tolerance:g}: first the {first.kind} of {first.where} ({first.size:.1e}); "
            f"{len(off)} of {len(found)} comparisons"
        )
        return 1


def _size(difference: Difference) -> float:
    return difference.size if difference.size == difference.size else float("inf")


def _prepare(options: argparse.Namespace, argv: list[str], folder: Path) -> LayoutCheck:
    from megatron.training.initialize import tokenizer_of
    from megatron.training.layout_settings import alone, changes, is_large, ranks_of, reproducible, shrink
    from megatron.training.settings import read_settings

    script = _load_script(options.script)
    given = read_settings(argv, needs_data=options.script is None)
    ranks = ranks_of(given, options.ranks)
    config = reproducible(given, ranks, options.steps, folder / "cache")
    tokenizer = tokenizer_of(config, required=options.script is None)
    vocab_size = tokenizer.vocab_size if tokenizer is not None else config.tokenizer.vocab_size or 0
    introduction = [
        f"{_layout(config, ranks)} on {ranks} ranks, and one process: {options.steps} steps on the CPU, in fp64, "
        "without dropout, at a constant learning rate, with a loss mask that counts some tokens only"
    ]
    if options.plant:
        introduction.append(f"planted on purpose: {options.plant}")
    config = _with_kernels_of_a_cpu(config, introduction)
    if is_large(config, ranks, vocab_size) and not options.full:
        small = shrink(config, ranks)
        introduction.append(f"shrunk to be quick (--full runs it as it is): {', '.join(changes(config, small))}")
        config = small
    return LayoutCheck(options, script, config, alone(config), ranks, introduction, folder)


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


def _load_script(path: str | None) -> ModuleType:
    file = Path(path) if path is not None else Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("pretrain_script", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--script {file}: no such Python file; name a pretrain script")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in ("datasets_provider", "model_provider", "forward_step") if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"--script {file}: has no {', '.join(missing)}; give a script with the three providers of pretrain_gpt.py "
            'that calls pretrain() under `if __name__ == "__main__"`'
        )
    return module


def _train(
    script: ModuleType, config: RunConfig, rank: int, ranks: int, steps: int, plant: str | None, folder: Path
) -> None:
    """One rank: what it saw and holds is left in the folder."""
    import torch

    from megatron.distributed.launch import LaunchInfo
    from megatron.distributed.rng import seed_rank
    from megatron.distributed.state import ParallelState
    from megatron.ops.select import resolve
    from megatron.training.assemble import assemble
    from megatron.training.initialize import Run, tokenizer_of
    from megatron.training.outcome import train_outcome, uneven_mask
    from megatron.training.planted import PLANTS
    from megatron.utils.log import RankLog

    layout, log = config.parallel.layout(ranks), RankLog(rank, io.StringIO())
    seed_rank(config.training.seed, layout.coordinates(rank))
    run = Run(
        config=config,
        launch=LaunchInfo(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks),
        device=torch.device("cpu"),
        dtype=torch.float64,
        parallel=ParallelState.build(layout, rank, timedelta(minutes=30)),
        kernels=resolve(config.kernels.spec, "cpu", attention=config.kernels.attention, warn=log.warn),
        tokenizer=tokenizer_of(config, required=False),
        log=log,
        run_id="check",
    )
    with assemble(run, script.datasets_provider, script.model_provider, script.forward_step) as parts:
        if plant is not None:
            PLANTS[plant](parts)
        train_outcome(parts, steps, uneven_mask).save(folder / f"outcome_{rank}.pt")


def _with_kernels_of_a_cpu(config: RunConfig, introduction: list[str]) -> RunConfig:
    """Those of the run as far as they can be: native kernels know no fp64, and what replaces them is said."""
    from megatron.ops.select import resolve

    asked, kernels = config.kernels.kernels, config.kernels
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

"""Implements tools/check_layout.py: trains a script in its layout and in one process, and prints the comparison."""

import argparse
import importlib.util
import io
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch

from megatron.checkpoint.step_source import StepSource
from megatron.config import DataConfig, RunConfig
from megatron.config.sources import SettingsSource
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError, ReplicaError
from megatron.ops.select import resolve
from megatron.prove.check_layout import faults
from megatron.prove.check_layout.outcome import (
    Difference,
    RunOutcome,
    join,
    outcome_from_bytes,
    outcome_to_bytes,
    relative_differences,
    train_outcome,
)
from megatron.prove.check_layout.ranks import run_ranks
from megatron.prove.check_layout.reproducible import alone, changed_settings, is_large, ranks_of, reproducible, shrink
from megatron.training.assemble import assemble
from megatron.training.exit import in_one_line
from megatron.training.initialize import build_run, tokenizer_of
from megatron.training.settings import read_settings
from megatron.utils.log import RankLog

PRETRAIN_GPT = Path(__file__).resolve().parents[2] / "cli" / "train.py"
_PROVIDERS = ("datasets_provider", "model_provider", "forward_step")
_FORM = (
    'give a script with the three providers of pretrain_gpt.py that calls pretrain() under `if __name__ == "__main__"`'
)
_NEAREST_CAUSE = ("counted tokens", "gradient", "weight")
"""Kinds of differences, the nearest to the cause first."""


def compare_with_one_process(
    options: argparse.Namespace, argv: Sequence[str], source: StepSource, other_file: SettingsSource
) -> int:
    """Prints what is compared, how far the layout is from one process, and the verdict; returns the exit code. `source`
    reads steps and models of other programs, `other_file` their settings."""
    script = load_script(options.script)
    with tempfile.TemporaryDirectory(prefix="check-layout-") as cache:
        config, ranks, introduction = _settings(options, argv, Path(cache), source, other_file)
        for line in introduction:
            print(line, flush=True)
        got = _train(options, script, config, ranks, source, fault=options.plant)
        expected = _train(options, script, alone(config), 1, source)
    if isinstance(expected, ReplicaError):
        raise expected
    cause = str(got) if isinstance(got, ReplicaError) else _other_samples(got, expected, config.data)
    if isinstance(got, ReplicaError) or cause is not None:
        print(f"DIFFERENT: {cause}")
        return 1
    found = relative_differences(got, expected)
    print(_table(found))
    equal, line = _verdict(found, options.tolerance, ranks)
    print(line)
    return 0 if equal else 1


def _settings(
    options: argparse.Namespace, argv: Sequence[str], cache: Path, source: StepSource, other_file: SettingsSource
) -> tuple[RunConfig, int, list[str]]:
    """Returns the settings to train at the layout, the number of ranks, and introductory lines."""
    given = read_settings(argv, needs_data=options.script is None, source=source, other_file=other_file)
    ranks = ranks_of(given, options.ranks)
    config = reproducible(given, ranks, options.steps, cache)
    tokenizer = tokenizer_of(config, required=options.script is None)
    vocab_size = tokenizer.vocab_size if tokenizer is not None else config.tokenizer.vocab_size or 0
    introduction = [
        f"{_layout(config, ranks)} on {ranks} ranks, and one process: {options.steps} steps on the CPU, in fp64, "
        "without dropout, at a constant learning rate, each token's loss with its own weight"
    ]
    fewest = given.parallel.fewest_ranks
    if options.ranks is None and 1 < fewest < ranks:
        data = ranks // given.parallel.model_parallel_size
        introduction[0] += (
            f" (data {data} added to check the sums of data-parallel gradients; --ranks {fewest} for your layout)"
        )
    if options.plant:
        introduction.append(f"planted fault: {options.plant}")
    config = _with_kernels_of_a_cpu(config, introduction)
    if is_large(config, ranks, vocab_size) and not options.full:
        small = shrink(config, ranks)
        introduction.append(
            f"shrunk to be quick (--full keeps the sizes): {', '.join(changed_settings(config, small))}"
        )
        config = small
    return config, ranks, introduction


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
    """Selects the run's kernels where they can compute fp64. Adds lines about replaced native kernels to
    `introduction`."""
    asked, kernels = config.kernels.kernels, replace(config.kernels, cuda_graphs=False)
    if asked.split(",")[0].strip() == "native":
        kernels = replace(kernels, kernels=asked.replace("native", "auto", 1))
        introduction.append(f"--kernels {asked} is taken as {kernels.kernels}: the native kernels do not support fp64")
    table = resolve(kernels.spec, "cpu", attention=kernels.attention)
    if any(choice.backend.startswith("native") for choice in table.choices):
        introduction.append(
            "this compares layouts, not kernels: in fp64 a fallback replaces each native kernel (docs/kernels.md "
            "describes how native kernels are compared)"
        )
    return replace(config, kernels=kernels)


def _train(
    options: argparse.Namespace,
    script: ModuleType,
    config: RunConfig,
    ranks: int,
    source: StepSource,
    *,
    fault: str | None = None,
) -> RunOutcome | ReplicaError:
    """Trains a few steps in fp64, with a planted `fault` if named. Returns an error if replicas differ."""

    def body(rank: int) -> bytes:
        launch = LaunchInfo(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
        log = RankLog(rank, io.StringIO())
        cpu = torch.device("cpu")
        run = build_run(config, launch, device=cpu, dtype=torch.float64, log=log, needs_data=False, source=source)
        with assemble(run, script.datasets_provider, script.model_provider, script.forward_step) as parts:
            if fault is not None:
                getattr(faults, fault.replace("-", "_"))(parts)
            return outcome_to_bytes(train_outcome(parts, options.steps))

    results = run_ranks(ranks, body, timedelta(minutes=options.timeout_minutes))
    try:
        return join([outcome_from_bytes(result) for result in results])
    except ReplicaError as error:
        return error


def load_script(path: str | None) -> ModuleType:
    """Returns the module of `path`, by default pretrain_gpt.py; it must have the three providers."""
    file = PRETRAIN_GPT if path is None else Path(path)
    spec = importlib.util.spec_from_file_location("pretrain_script", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--script {file}: no such Python file; name a pretrain script")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script that trains on import raises SystemExit
        raise ConfigError(f"--script {file}: cannot be imported: {in_one_line(error)}; {_FORM}") from error
    missing = [name for name in _PROVIDERS if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"--script {file}: has no {', '.join(missing)}; {_FORM}")
    return module


# ---------------------------------------------------------------- printed results of the comparison


def _other_samples(got: RunOutcome, expected: RunOutcome, data: DataConfig) -> str | None:
    """Explains why the two runs did not read the same samples, so nothing else can be equal; None if they did."""
    steps = zip(got.samples, expected.samples, strict=True)
    step = next((number for number, (ours, theirs) in enumerate(steps, 1) if ours != theirs), None)
    if step is None:
        return None
    what = f"in step {step} the layout and one process read different samples"
    if data.dataloader_type != "cyclic":
        return (
            f"{what}, so nothing else is compared; a dataset must be the same on every rank and for any number of ranks"
        )
    if data.data_sharding:
        why = "shuffles a part of the data for each data-parallel rank, as Megatron does, so the order of samples"
        way = "add --no-data-sharding, or use --dataloader-type single"
    else:
        why = "ends an epoch with the last whole block of all data-parallel ranks, so the order after the first epoch"
        way = "use --dataloader-type single, or fewer --steps"
    return f"{what}: --dataloader-type cyclic {why} depends on the number of these ranks; {way}"


def _table(differences: Sequence[Difference]) -> str:
    lines = ["largest relative difference of"]
    for kind in dict.fromkeys(difference.kind for difference in differences):
        some = [difference for difference in differences if difference.kind == kind]
        worst = max(some, key=_size)
        lines.append(f"  {kind:<19} {worst.size:8.1e}  ({worst.where}; {len(some)} compared)")
    return "\n".join(lines)


def _verdict(differences: Sequence[Difference], tolerance: float, ranks: int) -> tuple[bool, str]:
    """Returns whether all are within the tolerance, and a line with the verdict that names the first difference."""
    off = [difference for difference in differences if not _size(difference) <= tolerance]
    if not off:
        return True, f"EQUAL within {tolerance:g}: {ranks} ranks train what one process trains"
    first = min(off, key=_distance_to_cause)
    return False, (
        f"DIFFERENT beyond {tolerance:g}: first the {first.kind} of {first.where} ({first.size:.1e}); "
        f"{len(off)} of {len(differences)} comparisons differ"
    )


def _distance_to_cause(difference: Difference) -> int:
    known = difference.kind in _NEAREST_CAUSE
    return _NEAREST_CAUSE.index(difference.kind) if known else len(_NEAREST_CAUSE)


def _size(difference: Difference) -> float:
    """Size of a difference; NaN counts as larger than any number."""
    return math.inf if math.isnan(difference.size) else difference.size

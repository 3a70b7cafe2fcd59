"""Batch sizes, run length and stop conditions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.flag import Exclude, Need, excludes, flag
from megatron.utils.numerals import INT32

_LISTENS = Need("--exit-signal-handler", lambda run: run.training.exit_signal_handler)
_SPIKES = Need("--check-for-spiky-loss", lambda run: run.training.check_for_spiky_loss)
_MANUAL_GC = Need("--manual-gc", lambda run: run.training.manual_gc)
_GROWING_BATCH = ("rampup_batch_size", "step_batch_size_schedule")


def _by_iterations(run: Any) -> bool:
    return run.training.train_iters is not None and run.training.train_samples is None


def _in_other_unit(unit: str, own: Callable[[Any], bool] | None = None) -> Iterator[Exclude]:
    """Yields exclusions of the schedule settings in `unit`: as in Megatron-LM, a run and its schedule use one unit."""
    right = {"samples": "iters", "iters": "samples"}[unit]
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        way_out = f"use --{name.replace('_', '-')}-{right}"
        yield from excludes(f"{name}_{unit}", why="they count in different units", way_out=way_out, own=own)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    micro_batch_size: int = flag(
        0, "Samples per forward pass on one rank.", at_least=1, at_most=INT32, required=True, aliases=("--batch-size",)
    )
    global_batch_size: int | None = flag(
        None,
        "Samples per optimizer step over all ranks. Unset: micro-batch size x data-parallel size.",
        at_least=1,
        at_most=INT32,
    )
    gradient_accumulation_steps: int | None = flag(
        None,
        "Micro-batches per rank and step. Unset: computed from --global-batch-size. If both are given, "
        "--micro-batch-size may be omitted.",
        at_least=1,
        at_most=INT32,
        excludes=excludes(*_GROWING_BATCH, why="the latter changes the batch size during the run"),
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "START INCREMENT SAMPLES: grow from START to --global-batch-size over SAMPLES samples.", nargs=3
    )
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        None,
        "Schedule of the global batch size, TOKENS:SIZE ...: SIZE applies from TOKENS consumed tokens on, as in 0:384 "
        "200B:768. Replaces --global-batch-size.",
        nargs="+",
        excludes=excludes("global_batch_size", "rampup_batch_size"),
    )
    train_iters: int | None = flag(
        None,
        "Number of training steps. Alternative: --train-samples.",
        at_least=1,
        excludes=(
            *excludes("train_samples"),
            *_in_other_unit("samples", _by_iterations),
            *excludes(
                *_GROWING_BATCH,
                way_out="give the length of the run in samples, with --train-samples",
                own=_by_iterations,
            ),
        ),
    )
    train_samples: int | None = flag(
        None,
        "Number of training samples. Alternative: --train-iters.",
        at_least=1,
        excludes=(*_in_other_unit("iters"),),
    )
    exit_interval: int | None = flag(None, "Save and stop when the iteration is a multiple of this.", at_least=1)
    exit_duration_in_mins: float | None = flag(None, "Save and stop after this many minutes.", above=0.0)
    exit_signal_handler: bool = flag(
        False, "Save and stop on SIGTERM, on SIGUSR1 (sent by schedulers ahead of a time limit) or on Ctrl-C."
    )
    exit_signal: str | None = flag(
        None,
        "Signal that --exit-signal-handler listens to. Unset: SIGTERM, SIGUSR1 and SIGINT (Ctrl-C).",
        choices=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"),
        needs=(_LISTENS,),
    )
    seed: int = flag(1234, "Seed of initial weights, sample order and dropout.", at_least=0)
    skip_train: bool = flag(False, "Evaluate without training.")
    iterations_to_skip: tuple[int, ...] | None = flag(
        None, "Iterations that consume their data without a training step.", nargs="+"
    )
    deterministic_mode: bool = flag(False, "Use only operations that give the same bits in every run.")
    manual_gc: bool = flag(False, "Run Python's garbage collector at fixed iterations only.")
    manual_gc_interval: int = flag(
        0, "Iterations between two collections under --manual-gc. 0: never.", at_least=0, needs=(_MANUAL_GC,)
    )
    manual_gc_eval: bool = flag(
        True, "Do not collect garbage around evaluations.", off="--no-manual-gc-eval", needs=(_MANUAL_GC,)
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "Do not stop on a NaN or infinity in loss or gradient.", off="--no-check-for-nan-in-loss-and-grad"
    )
    check_for_spiky_loss: bool = flag(False, "Warn about spikes of the loss.")
    spiky_loss_factor: float = flag(
        10.0,
        "Threshold of a spike, as a multiple of the largest loss of the last 100 steps.",
        above=0.0,
        needs=(_SPIKES,),
    )
    rerun_mode: str = flag(
        "disabled",
        "Repeat a suspicious step to distinguish hardware from software faults.",
        choices=("disabled", "validate_results", "report_stats"),
        status="no-op",
        note="no step is run twice; --check-replicas-every finds ranks that differ",
    )

"""Hooks: optional work of a run. This module does not import torch, so that a script's `--help` stays fast."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from megatron.config import TrainingConfig
    from megatron.pipeline_parallel.pass_recorder import PassRecorder
    from megatron.training.initialize import Run
    from megatron.training.metrics import EvalRecord, TrainRecord


class Hook:
    """Base class of hooks: override the methods that you need, and pass the hook to `pretrain(..., hooks=[...])`.

    Every rank has the hooks and calls them at the same points, built-in ones first, then yours in the given order. A
    hook may therefore use collectives; one that writes or prints does so on one rank: `if run.log.main`. Records hold
    global numbers, equal on all ranks except for times. An exception ends the run.
    """

    def on_start(self, run: Run, model: nn.Module) -> None:
        """Called once, when everything is built and loaded. `model` is the part of the model that this rank holds."""

    def before_iteration(self, iteration: int) -> None:
        """Called before the iteration's data is read. Iterations count from 1."""

    def after_iteration(self, iteration: int) -> None:
        """Called when the iteration's work has been launched. An accelerator may still be computing it."""

    def on_step(self, record: TrainRecord, times: Mapping[str, float]) -> None:
        """Called after every optimizer step, once its outcome is known: on an accelerator during the next iteration.

        An iteration skipped by --iterations-to-skip has no step. `record.reported` has "params_norm" only when it is
        logged. `times`: seconds that this rank spent in each phase of the step.
        """

    def on_log(self, record: TrainRecord) -> None:
        """Called every --log-interval iterations, after `on_step`."""

    def on_evaluate(self, record: EvalRecord) -> None:
        """Called after each evaluation of the validation or the test split."""

    def on_end(self) -> None:
        """Called once when the run ends, also with an error."""


class ManualGarbageCollection(Hook):
    """Implements --manual-gc: all ranks collect garbage at the same iterations. Automatic collections would delay one
    rank at a time, while all others wait for it."""

    def __init__(self, config: TrainingConfig) -> None:
        self._interval, self._after_evaluation = config.manual_gc_interval, config.manual_gc_eval
        self._was_enabled = False

    def on_start(self, run: Run, model: nn.Module) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def before_iteration(self, iteration: int) -> None:
        if self._interval and (iteration - 1) % self._interval == 0:
            gc.collect()

    def on_evaluate(self, record: EvalRecord) -> None:
        if self._after_evaluation:
            gc.collect()

    def on_end(self) -> None:
        if self._was_enabled:
            gc.enable()


class PipelineTrace(Hook):
    """Implements --pipeline-trace: writes the times of this rank's passes in the last steps when the run ends."""

    def __init__(self, recorder: PassRecorder, directory: Path, rank: int) -> None:
        self._recorder, self._directory, self._rank = recorder, directory, rank

    def on_end(self) -> None:
        self._recorder.save(self._directory, self._rank)

"""Hooks: what a run does besides training. Importing this loads no torch, so that `--help` of a script stays quick."""

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
    """Override the moments you need and hand the hook to `pretrain(..., hooks=[...])`.

    Every rank has the hooks and calls them at the same moments, the built-in ones first, then yours in the order given.
    So a hook may use collectives, and one that writes or prints does so on one rank: `if run.log.main`. The records
    hold global numbers, equal on all ranks except for times. An exception ends the run.
    """

    def on_start(self, run: Run, model: nn.Module) -> None:
        """Once, when everything is built and loaded. `model` is the part of the model that this rank holds."""

    def before_iteration(self, iteration: int) -> None:
        """Before the iteration's data is read. Iterations count from 1."""

    def after_iteration(self, iteration: int) -> None:
        """The iteration's work has been handed to the device. An accelerator may still be computing it."""

    def on_step(self, record: TrainRecord, times: Mapping[str, float]) -> None:
        """After every optimizer step, as soon as its outcome is known: on an accelerator during the next iteration.

        An iteration passed over by --iterations-to-skip has no step. `record.reported` has "params_norm" only where it
        is logged. `times` are the seconds that this rank spent in the phases of the step.
        """

    def on_log(self, record: TrainRecord) -> None:
        """Every --log-interval iterations, after `on_step`."""

    def on_evaluate(self, record: EvalRecord) -> None:
        """After each evaluation of the validation or the test split."""

    def on_end(self) -> None:
        """Once, when the run is over, also when it ends with an error."""


class ManualGarbageCollection(Hook):
    """--manual-gc: Python collects garbage at the same iterations on all ranks. At a moment of Python's choosing a
    collection delays one rank, and all others wait for it."""

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
    """--pipeline-trace: when each pass of the last steps ran on this rank, written when the run is over."""

    def __init__(self, recorder: PassRecorder, directory: Path, rank: int) -> None:
        self._recorder, self._directory, self._rank = recorder, directory, rank

    def on_end(self) -> None:
        self._recorder.save(self._directory, self._rank)

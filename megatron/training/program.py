"""Runs one training as a program: flags -> RunConfig -> parts -> `Trainer.fit()`, for `megatron.pretrain`.

The command line is read before torch is imported, so `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.training.exit import StopReason, run_as_program
from megatron.utils.loading import loading_torch

if TYPE_CHECKING:
    from megatron.checkpoint.step_source import StepSource
    from megatron.config.sources import SettingsSource
    from megatron.model.passes import ForwardStep
    from megatron.training.assemble import Parts
    from megatron.training.batches import DatasetsProvider
    from megatron.training.hooks import Hook
    from megatron.training.initialize import Run
    from megatron.training.model import ModelProvider


def run_training(
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    argv: Sequence[str] | None,
    *,
    needs_data: bool,
    hooks: Sequence[Hook],
    source: StepSource,
    other_file: SettingsSource,
) -> StopReason:
    """Implements `megatron.pretrain.pretrain`. `source` reads other programs' checkpoints, `other_file` their
    settings."""

    def body() -> StopReason:
        from megatron.config import describe
        from megatron.training.settings import read_settings
        from megatron.training.signals import noted_while_starting

        config = read_settings(argv, needs_data=needs_data, source=source, other_file=other_file)
        signals = noted_while_starting(config.training)

        with loading_torch():
            from torch import get_num_threads

            from megatron.training.assemble import assemble
            from megatron.training.checkpointing import held_save_directory
            from megatron.training.dry_run import check_launch_files, render_plan
            from megatron.training.initialize import start
            from megatron.training.memory import with_memory_checked
            from megatron.training.watchdog import watched
            from megatron.utils.waiting import spinning_while_idle

        yaml = config.runtime.prints_yaml
        run = start(config, needs_data=needs_data, source=source, stream=sys.stderr if yaml else None)
        if config.runtime.plans:
            check_launch_files(run, needs_data=needs_data)
            plan = render_plan(run, model_provider)
            if yaml and run.log.main:
                print(describe(config))
            else:
                run.log.info(*(describe(config) if config.runtime.print_config else plan).split("\n"))
            return StopReason("planned", "--print-config" if config.runtime.print_config else "--dry-run")
        checked = with_memory_checked(model_provider)
        with held_save_directory(run) as (history, exit_record):
            with (
                spinning_while_idle(get_num_threads()),
                watched(run, history, exit_record) as position,
                assemble(run, datasets_provider, checked, forward_step, history, hooks) as parts,
            ):
                position.parts = parts
                if parts.trainer_if_any is not None:
                    parts.trainer_if_any.stop.listen_until_exit(signals.received)
                reason = train_and_evaluate(run, parts)
            exit_record.ended(reason, parts.progress.iteration)
        return reason

    return run_as_program(body)


def train_and_evaluate(run: Run, parts: Parts) -> StopReason:
    """Trains, then evaluates a last time, as Megatron does. A run that stops early does not evaluate."""
    progress = parts.progress
    if run.config.training.skip_train:
        reason = StopReason("done", "--skip-train: evaluation only")
    else:
        reason = parts.trainer.fit()
    run.log.info(f"stopped at iteration {progress.iteration}: {reason.text}")
    if reason.warning:
        run.log.warn(reason.warning)
    if reason.kind == "done":
        where = f"iteration {progress.iteration}"
        parts.evaluator.valid(progress, f"{where} on validation set")
        parts.evaluator.test(progress, f"{where} on test set")
    return reason

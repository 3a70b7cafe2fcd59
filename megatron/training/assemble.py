"""Builds the parts of a run from its settings: data, model, gradients, optimizer, schedule, checkpoints, trainer."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from megatron.checkpoint.run_state import RunHistory
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.data.datasets import Datasets
from megatron.data.splits import sample_counts
from megatron.engine import Engine, Evaluation, build_engine
from megatron.model.passes import ForwardStep
from megatron.optimizer import Schedule, build_schedule
from megatron.pipeline_parallel.pipeline import Pipeline
from megatron.state.shard import Shard
from megatron.training.batches import (
    BatchMaker,
    Data,
    DatasetsProvider,
    NumSamples,
    as_datasets,
    check_evaluation,
    check_validation,
    validation_plan_of,
)
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.evaluate import SplitEvaluator
from megatron.training.hooks import Hook, ManualGarbageCollection, PipelineTrace
from megatron.training.identity import meet_over_data
from megatron.training.initialize import Run
from megatron.training.metric_writers import build_metric_writers, writing_file_of
from megatron.training.model import ModelProvider, build_model
from megatron.training.profiling.profiler import build_profiler
from megatron.training.replica_check import ReplicaCheck
from megatron.training.resume import Progress, ResumePoint, find_resume_point
from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class Parts:
    """Parts of one run. Leaving the `with` block ends the hooks and releases files and handlers."""

    engine: Engine | Evaluation
    """An `Evaluation` under --skip-train."""
    evaluator: SplitEvaluator
    progress: Progress
    checkpoints: RunCheckpoints
    trainer_if_any: Trainer | None  # None under --skip-train
    closing: ExitStack

    @property
    def trainer(self) -> Trainer:
        assert self.trainer_if_any is not None, "--skip-train: nothing is trained"
        return self.trainer_if_any

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.closing.__exit__(*error)


def assemble(
    run: Run,
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    history: RunHistory | None = None,
    hooks: Sequence[Hook] = (),
) -> Parts:
    """Builds all parts of a run and loads its checkpoint. `history`: record of this run's saves; default: a new one.
    `hooks` run after those that the settings enable.

    A checkpoint is hashed while it is read into the parts. If it is damaged, all parts are rebuilt, and another step is
    loaded, which is verified before it is read."""
    with ExitStack() as closing:
        if history is None:
            history = RunHistory(run.run_id)
            closing.callback(history.close)
        build = partial(_assemble, run, datasets_provider, model_provider, forward_step, history, hooks)
        parts = None
        try:
            parts = build(hash_later=run.device.type == "cpu", store=run.store)
        except DamagedCheckpointError as error:
            run.log.info(f"warning: {error}: its tensors are discarded; another step is verified and then loaded")
        if parts is None:  # outside the except block, where the error no longer references the old parts
            again = None if run.store is None else dist.PrefixStore("again", run.store)
            parts = build(hash_later=False, store=again)
        closing.push(parts)
        return replace(parts, closing=closing.pop_all())


def _assemble(
    run: Run,
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    history: RunHistory,
    hooks: Sequence[Hook],
    *,
    hash_later: bool,
    store: dist.Store | None,
) -> Parts:
    """Builds all parts once. `store`: where the ranks meet over the data; every call needs an unused one."""
    config = run.config
    engine: Engine | Evaluation
    with ExitStack() as closing:
        resume_point = find_resume_point(run, history, hash_later=hash_later)
        resume_point.check_architecture(config)
        data = build_data(run, resume_point, datasets_provider, store)
        built = build_model(run, model_provider, forward_step, loaded_next=resume_point.found is not None)
        batches = BatchMaker(run, built.fields)
        closing.callback(batches.close)
        if config.training.skip_train:
            engine = Evaluation(built.model, built.passes, run.parallel, device=run.device, divided=built.divided)
            schedule = None
        else:
            engine = build_engine(config, built, run.parallel, run.kernels, run.device)
            schedule = build_schedule(
                config.schedule,
                config.optimizer,
                config.deepspeed_scheduler,
                global_batch_size=run.batch_plan.final_batch_size,
                train_iters=config.training.train_iters,
                train_samples=config.training.train_samples,
            )
        progress = Progress()
        checkpoints = RunCheckpoints(run, engine, built.specs, schedule, data.remembered, history)
        closing.push(checkpoints.end)
        if config.checkpoint.load:
            checkpoints.load(progress, resume_point, hash_later=hash_later)
        hooks = [*build_hooks(run, engine, built.specs, progress), *hooks]
        for hook in hooks:
            closing.callback(hook.on_end)
            hook.on_start(run, built.model)
        evaluator = SplitEvaluator(run, engine, data, batches, hooks)
        trainer = None
        if isinstance(engine, Engine) and schedule is not None:
            done, consumed = progress.iteration, progress.consumed_train_samples
            ended = run.batch_plan.is_finished(done, consumed)
            if not ended:
                checkpoints.warn_before_training()
                _warn_of_zero_rate(run, schedule, progress)
            train_batches = iter(()) if ended else batches.train(data.datasets.train, consumed)
            trainer = Trainer(run, engine, schedule, train_batches, progress, evaluator, checkpoints, hooks)
            closing.callback(trainer.stop.close)
        return Parts(engine, evaluator, progress, checkpoints, trainer, closing.pop_all())


def _warn_of_zero_rate(run: Run, schedule: Schedule, progress: Progress) -> None:
    """Warns if the learning rate is 0 in all remaining steps, so that the rest of the run trains nothing."""
    start, plan = progress.schedule_samples, run.batch_plan
    left = plan.samples_left(progress.iteration, progress.consumed_train_samples)
    to_come = range(start, start + left, max(plan.final_batch_size, left // 1000))
    if (warning := schedule.warning_at_zero(to_come)) is not None:
        run.log.warn(warning)


def build_hooks(run: Run, engine: Engine | Evaluation, specs: Mapping[str, Shard], progress: Progress) -> list[Hook]:
    """Builds the hooks that the settings enable. Metrics are equal on all ranks, so only rank 0 writes them."""
    config, world = run.config, run.launch.world_size
    hooks: list[Hook] = []
    if config.training.manual_gc:
        hooks.append(ManualGarbageCollection(config.training))
    hooks += build_profiler(config.profile, run.launch.rank, run.device, progress.iteration, run.log)
    if isinstance(engine.passes, Pipeline) and engine.passes.recorder is not None:
        assert config.parallel.pipeline_trace is not None
        hooks.append(PipelineTrace(engine.passes.recorder, Path(config.parallel.pipeline_trace), run.launch.rank))
    if config.parallel.check_replicas_every and world > 1 and isinstance(engine, Engine):
        hooks.append(ReplicaCheck(config.parallel.check_replicas_every, engine, specs))
    if run.log.main:
        hooks += build_metric_writers(config, world_size=world, device=run.device)
    return hooks


def build_data(
    run: Run, resume_point: ResumePoint, datasets_provider: DatasetsProvider, store: dist.Store | None
) -> Data:
    """Builds the datasets and checks them against the resumed run's datasets."""
    training, accepted = not run.config.training.skip_train, []
    if training:
        resume_point.check_tokenizer(run.tokenizer)
        accepted += resume_point.check_settings(run.config)
    wanted = _samples_wanted(run, resume_point)
    datasets = as_datasets(datasets_provider(run, wanted))
    if store is not None:
        meet_over_data(datasets, store, run.launch)
    _show(run, datasets)
    if training:
        accepted += resume_point.check_content(datasets.fingerprint, accept=run.config.data.accept_changed_data)
        for warning in (*accepted, *resume_point.order_warning(wanted[0])):
            run.log.warn(warning)
    if run.config.evaluation.eval_iters:
        for name, dataset in datasets.validated.items():
            check_validation(run, len(dataset), name)
            if validation_plan_of(run) is None:
                check_evaluation(run, dataset, "validation set")
        check_evaluation(run, datasets.test, "test set")
    saved = {"fingerprint": datasets.fingerprint, "train_samples": wanted[0]}
    return Data(datasets, saved if run.tokenizer is None else {**saved, "tokenizer": run.tokenizer.fingerprint})


def _show(run: Run, datasets: Datasets) -> None:
    if datasets.table:
        run.log.info(*datasets.table.split("\n"))
    run.log.info(*filter(None, datasets.notes))
    for warning in datasets.warnings:
        run.log.warn(warning)
    path = run.config.data.data_table_path
    if path is not None and run.log.main:
        with writing_file_of("--data-table-path", path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(f"{datasets.full_table}\n", encoding="utf-8")


def _samples_wanted(run: Run, resume_point: ResumePoint) -> NumSamples:
    evaluation, plan = run.config.evaluation, run.batch_plan
    train, valid, test = sample_counts(
        train_iters=plan.total_iterations,
        train_samples=0 if run.config.training.skip_train else resume_point.train_samples(plan),
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=plan.evaluation_batch_size,
    )
    return train, None if valid and validation_plan_of(run) is not None else valid, test

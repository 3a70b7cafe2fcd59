"""From settings to the parts of a run: data, model, gradients, optimizer, schedule, checkpoints, trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from megatron.checkpoint import RunHistory
from megatron.config import to_dict
from megatron.data.build import Datasets
from megatron.data.splits import sample_counts
from megatron.data_parallel import GradBuffers
from megatron.distributed.state import Axis
from megatron.engine import Engine, Evaluation, ForwardStep, GraphedPasses, RouterSteps, SinglePass
from megatron.errors import ConfigError
from megatron.model.flops import flops_per_token, peak_flops
from megatron.model.gpt import GPT
from megatron.optimizer import Schedule, build_optimizer, build_schedule
from megatron.parallelize import ReplicaSums, persistent_buffers
from megatron.parallelize.experts import is_expert
from megatron.parallelize.wgrads import send_weight_gradients
from megatron.pipeline_parallel.pipeline import Pipeline
from megatron.training.batch_plan import BatchPlan
from megatron.training.batches import BatchMaker, Provided, as_datasets
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.evaluate import SplitEvaluator
from megatron.training.hooks import Hook, build_hooks, writing
from megatron.training.initialize import Run
from megatron.training.model import BuiltModel, build_model
from megatron.training.origin import Origin, find_origin
from megatron.training.profiling import build_profiling
from megatron.training.progress import Progress
from megatron.training.replica_check import ReplicaCheck
from megatron.training.stopping import StopConditions
from megatron.training.throughput import Throughput
from megatron.training.trainer import Trainer
from megatron.utils.cuda import CudaGraph
from megatron.utils.device import device_name

NumSamples = tuple[int, int | None, int]
"""Wanted of train, valid and test; None is the whole split once."""


@dataclass
class Parts:
    """What one run is made of; leaving the `with` block releases files and handlers."""

    engine: Evaluation
    evaluator: SplitEvaluator
    progress: Progress
    checkpoints: RunCheckpoints
    closing: ExitStack
    fitting: Trainer | None = None  # None under --skip-train

    @property
    def trainer(self) -> Trainer:
        assert self.fitting is not None, "--skip-train: nothing is trained"
        return self.fitting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.close()


@dataclass(frozen=True)
class Data:
    """The three sets, how they become batches, and what a checkpoint remembers of them."""

    datasets: Datasets
    batches: BatchMaker
    remembered: Mapping[str, Any]


def assemble(
    run: Run,
    datasets_provider: Callable[[Run, NumSamples], Provided],
    model_provider: Callable[[Run], nn.Module],
    forward_step: ForwardStep,
    history: RunHistory | None = None,
) -> Parts:
    """`history` is what the run holds and remembers of its directories; without one it begins here."""
    config, plan = run.config, BatchPlan(run.config, run.parallel.dp.size)
    with ExitStack() as closing:
        if history is None:
            history = RunHistory(run.run_id)
            closing.callback(history.close)
        origin = find_origin(run, history)
        origin.check_architecture(config)
        data = build_data(run, plan, origin, datasets_provider)
        closing.callback(data.batches.close)
        built = build_model(run, model_provider, forward_step)
        engine, schedule = _build_engine(run, plan, built, forward_step)
        if isinstance(built.passes, Pipeline) and built.passes.trace is not None:
            assert config.parallel.pipeline_trace is not None
            closing.callback(built.passes.trace.save, Path(config.parallel.pipeline_trace), run.launch.rank)
        progress = Progress()
        optimizer = engine.optimizer if isinstance(engine, Engine) else None
        checkpoints = RunCheckpoints(run, built.model, built.specs, optimizer, schedule, data.remembered, history)
        if config.checkpoint.load:
            checkpoints.load(progress, origin)
        hooks = build_hooks(
            config, to_dict(config), rank=run.launch.rank, world_size=run.launch.world_size, device=run.device
        )
        for hook in hooks:
            closing.callback(hook.on_end)
        parts = Parts(engine, _evaluator(run, plan, engine, data, hooks), progress, checkpoints, closing)
        if isinstance(engine, Engine) and schedule is not None:
            parts.fitting = _trainer(run, plan, engine, schedule, data, parts, hooks)
            if config.parallel.check_replicas_every and run.launch.world_size > 1:
                parts.fitting.check_replicas = ReplicaCheck(built.model, built.specs, engine.optimizer, run.parallel)
            closing.callback(parts.fitting.stop.close)
            closing.callback(parts.fitting.profiling.close)
        parts.closing = closing.pop_all()
        return parts


def build_data(
    run: Run, plan: BatchPlan, origin: Origin, datasets_provider: Callable[[Run, NumSamples], Provided]
) -> Data:
    """The datasets as the run before had them, if there was one."""
    training, accepted = not run.config.training.skip_train, []
    if training:
        accepted += origin.check_settings(run.config)
    wanted = _samples_wanted(run, plan, origin)
    datasets = as_datasets(datasets_provider(run, wanted))
    _show(run, datasets)
    if training:
        accepted += origin.check_content(datasets.fingerprint, accept=run.config.data.accept_changed_data)
        for warning in (*accepted, *origin.order_warning(wanted[0])):
            run.log.warn(warning)
    batches = BatchMaker(run, plan.final_batch_size)
    if run.config.evaluation.eval_iters:
        batches.check_evaluation(datasets.valid, "validation")
        batches.check_evaluation(datasets.test, "test")
    return Data(datasets, batches, {"fingerprint": datasets.fingerprint, "train_samples": wanted[0]})


def _show(run: Run, datasets: Datasets) -> None:
    for text in (datasets.table, *datasets.notes):
        if text:
            run.log.info(text)
    for warning in datasets.warnings:
        run.log.warn(warning)
    path = run.config.data.data_table_path
    if path is not None and run.log.main:
        with writing("--data-table-path", path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(f"{datasets.full_table}\n", encoding="utf-8")


def _samples_wanted(run: Run, plan: BatchPlan, origin: Origin) -> NumSamples:
    evaluation = run.config.evaluation
    train, valid, test = sample_counts(
        train_iters=plan.total_iterations,
        train_samples=0 if run.config.training.skip_train else origin.train_samples(plan),
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=plan.final_batch_size,
    )
    return train, None if evaluation.full_validation and valid else valid, test


def _build_engine(
    run: Run, plan: BatchPlan, built: BuiltModel, forward_step: ForwardStep
) -> tuple[Evaluation, Schedule | None]:
    """An evaluation needs no gradients, no optimizer and no schedule, and under --skip-train has none."""
    config, model, specs = run.config, built.model, built.specs
    if config.training.skip_train:
        return Evaluation(model, forward_step, run.parallel, device=run.device, passes=built.passes), None
    experts = [name for name in specs if is_expert(name)]
    grads = GradBuffers(
        model.named_parameters(),
        run.parallel.dp_cp,
        axes=dict.fromkeys(experts, run.parallel.expert_dp),
        overlap=config.parallel.overlap_grad_reduce,
        flat=config.kernels.cuda_graphs or any((run.kernels.adamw, run.kernels.wgrad_accumulation)),
        accumulate=run.kernels.wgrad_accumulation,
    )
    if built.wgrad_queue is not None:
        built.wgrad_queue.then = grads
    elif run.kernels.wgrad_accumulation is not None and isinstance(model, GPT):
        send_weight_gradients(model, grads)
    dense, shared = _norm_axes(run)
    schedule = build_schedule(
        config.schedule,
        config.optimizer,
        global_batch_size=plan.final_batch_size,
        train_iters=config.training.train_iters,
        train_samples=config.training.train_samples,
    )
    engine = Engine(
        model,
        forward_step,
        grads,
        build_optimizer(
            grads,
            config.optimizer,
            config.precision,
            split_over=dict.fromkeys(specs, dense) | dict.fromkeys(experts, shared),
            norm_axes=(dense, shared),
            specs=specs,
            kernels=run.kernels,
            asynchronous=runs_ahead(run.device),
        ),
        run.parallel,
        device=run.device,
        stop_on_nonfinite=config.training.check_for_nan_in_loss_and_grad,
        buffers=persistent_buffers(model),
        sum_replicas=ReplicaSums(specs, run.parallel),
        passes=_graphed(run, model, forward_step, grads) if config.kernels.cuda_graphs else built.passes,
        routers=_router_steps(run, model),
    )
    return engine, schedule


def _graphed(run: Run, model: nn.Module, forward_step: ForwardStep, grads: GradBuffers) -> GraphedPasses:
    if run.device.type != "cuda":
        raise ConfigError(f"--cuda-graphs: needs a CUDA device, and this run is on {run.device.type}; leave it out")
    if not isinstance(model, GPT):
        raise ConfigError(
            f"--cuda-graphs: records our GPT alone, and the model provider gave a {type(model).__name__}; leave it out"
        )
    return GraphedPasses(SinglePass(model, forward_step), grads, partial(CudaGraph, run.device))


def runs_ahead(device: torch.device) -> bool:
    """Whether steps are handed over while earlier ones are still computed, and nothing waits for their numbers."""
    return device.type == "cuda"


def _norm_axes(run: Run) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """What norms are added up over: those of what every rank of a model has a part of, and those of experts."""
    model, ep = run.parallel.model, run.parallel.ep
    dense = (model,) if model.size > 1 else ()
    return dense, (*dense, ep) if ep.size > 1 else dense


def _router_steps(run: Run, model: nn.Module) -> RouterSteps | None:
    if not isinstance(model, GPT) or model.routers is None:
        return None
    return RouterSteps(model, model.routers, run.parallel, run.device)


def _trainer(
    run: Run, plan: BatchPlan, engine: Engine, schedule: Schedule, data: Data, parts: Parts, hooks: list[Hook]
) -> Trainer:
    progress = parts.progress
    finished = plan.is_finished(progress.iteration, progress.consumed_train_samples)
    return Trainer(
        run.config,
        engine,
        schedule,
        plan,
        iter(()) if finished else data.batches.train(data.datasets.train, progress.consumed_train_samples),
        progress=progress,
        throughput=_throughput(run, engine.model),
        evaluator=parts.evaluator,
        saver=parts.checkpoints if run.config.checkpoint.save else None,
        stop=StopConditions(run.config.training, run.parallel.world, run.device, run.started),
        hooks=hooks,
        log=run.log,
        profiling=build_profiling(run.config.profile, run.launch.rank, run.device, progress.iteration, run.log),
    )


def _evaluator(run: Run, plan: BatchPlan, engine: Evaluation, data: Data, hooks: list[Hook]) -> SplitEvaluator:
    return SplitEvaluator(
        engine,
        data.batches,
        valid=data.datasets.valid,
        test=data.datasets.test,
        eval_iters=run.config.evaluation.eval_iters,
        full_validation=run.config.evaluation.full_validation,
        micro_batches=plan.micro_batches(plan.final_batch_size),
        global_batch_size=plan.final_batch_size,
        hooks=hooks,
        log=run.log,
    )


def _throughput(run: Run, model: nn.Module) -> Throughput:
    seq_length = run.config.data.seq_length
    flops = None
    if isinstance(model, GPT):
        flops = flops_per_token(
            run.config.model, seq_length=seq_length, padded_vocab_size=run.padded_vocab_size, moe=run.config.moe
        )
    return Throughput(
        seq_length=seq_length,
        world_size=run.launch.world_size,
        flops_per_token=flops,
        peak_flops=peak_flops(device_name(run.device), run.config.precision.params_dtype),
    )

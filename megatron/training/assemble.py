"""From settings to the parts of a run: data, model, gradients, optimizer, schedule, checkpoints, trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from megatron.checkpoint.state import RunHistory
from megatron.config import to_dict
from megatron.data.build import Datasets
from megatron.data.loader import build_loader
from megatron.data.masks import MaskConfig
from megatron.data.splits import sample_counts
from megatron.data_parallel import GradBuffers, broadcast_parameters
from megatron.distributed.shard import ShardSpec
from megatron.engine import Batch, Engine, ForwardStep
from megatron.errors import ConfigError, DataError
from megatron.model.flops import flops_per_token, peak_flops
from megatron.model.gpt import GPT
from megatron.optimizer import build_optimizer, build_schedule
from megatron.parallelize import foreign_specs, gpt_specs, initialise_gpt
from megatron.training.batch_plan import BatchPlan
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.evaluate import BatchSource, SplitEvaluator
from megatron.training.hooks import Hook, build_hooks
from megatron.training.initialize import Run
from megatron.training.progress import Progress
from megatron.training.stopping import StopConditions
from megatron.training.throughput import Throughput
from megatron.training.trainer import Trainer
from megatron.utils.device import device_name


@dataclass
class Parts:
    """What one run is made of; leaving the `with` block releases files and handlers."""

    trainer: Trainer
    evaluator: SplitEvaluator
    progress: Progress
    engine: Engine
    closers: list[Callable[[], object]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for closer in reversed(self.closers):
            closer()


def assemble(
    run: Run,
    datasets_provider: Callable[[Run, tuple[int, int | None, int]], Datasets],
    model_provider: Callable[[Run], nn.Module],
    forward_step: ForwardStep,
) -> Parts:
    config, plan = run.config, BatchPlan(run.config, run.parallel.dp.size)
    datasets = datasets_provider(run, _samples_wanted(run, plan))
    for text in (datasets.table, *datasets.notes):
        run.log.info(text)
    model, specs = build_model(run, model_provider)
    grads = GradBuffers(model.named_parameters(), run.parallel.dp, overlap=config.parallel.overlap_grad_reduce)
    optimizer = build_optimizer(grads, config.optimizer, config.precision)
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
        optimizer,
        run.parallel,
        device=run.device,
        stop_on_nonfinite=config.training.check_for_nan_in_loss_and_grad and not config.precision.fp16,
    )
    progress, history = Progress(), RunHistory(run.run_id)
    checkpoints = RunCheckpoints(run, model, specs, optimizer, schedule, {"fingerprint": datasets.fingerprint}, history)
    if config.checkpoint.load:
        checkpoints.load(progress)
    hooks = build_hooks(
        config, to_dict(config), rank=run.launch.rank, world_size=run.launch.world_size, device=run.device
    )
    evaluator = _evaluator(run, plan, engine, datasets, hooks)
    stop = StopConditions(config.training, run.parallel.world, run.device)
    trainer = Trainer(
        config,
        engine,
        schedule,
        plan,
        _train_batches(run, datasets, progress),
        progress=progress,
        throughput=_throughput(run, model),
        evaluator=evaluator,
        saver=checkpoints if config.checkpoint.save else None,
        stop=stop,
        hooks=hooks,
        log=run.log,
    )
    closers: list[Callable[[], object]] = [history.close, stop.close, *(hook.on_end for hook in hooks)]
    return Parts(trainer, evaluator, progress, engine, closers)


def build_model(run: Run, model_provider: Callable[[Run], nn.Module]) -> tuple[nn.Module, Mapping[str, ShardSpec]]:
    """The model on its device in its dtype, with the initial values that (seed, name) decides."""
    model = _in_dtype_and_device(run, model_provider)
    if isinstance(model, GPT):
        specs: Mapping[str, ShardSpec] = gpt_specs(model, run.config.model, run.vocab_size)
        if run.config.checkpoint.perform_initialization:
            initialise_gpt(model, specs, run.config.model, run.config.training.seed)
        elif not run.config.checkpoint.load:
            raise ConfigError("--no-initialization: the weights must come from somewhere; give --load")
    else:
        specs = foreign_specs(model)
        broadcast_parameters(model.named_parameters(), run.parallel.dp)
        broadcast_parameters(model.named_buffers(), run.parallel.dp)
    count = sum(parameter.numel() for parameter in model.parameters())
    run.log.info(f"number of parameters: {count} ({run.config.precision.params_dtype})")
    return model, specs


def _in_dtype_and_device(run: Run, model_provider: Callable[[Run], nn.Module]) -> nn.Module:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(run.dtype)
    try:
        with torch.device(run.device):
            return model_provider(run).to(device=run.device, dtype=run.dtype)
    finally:
        torch.set_default_dtype(previous)


def _samples_wanted(run: Run, plan: BatchPlan) -> tuple[int, int | None, int]:
    """Of train, valid and test; None is the whole split once."""
    evaluation = run.config.evaluation
    train, valid, test = sample_counts(
        train_iters=plan.total_iterations,
        train_samples=plan.train_samples,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=plan.final_batch_size,
    )
    return train, None if evaluation.full_validation and valid else valid, test


def _batches(run: Run, dataset: Any, consumed: int, *, order: str = "single") -> Iterator[Batch]:
    """This rank's micro-batches of `dataset` from sample `consumed` on."""
    config = run.config
    return iter(
        build_loader(
            dataset,
            consumed_samples=consumed,
            micro_batch_size=config.training.micro_batch_size,
            dp_rank=run.parallel.dp.rank,
            dp_size=run.parallel.dp.size,
            num_workers=config.data.num_workers,
            masks=MaskConfig(
                eod_id=run.eod_id,
                reset_position_ids=config.data.reset_position_ids,
                reset_attention_mask=config.data.reset_attention_mask,
                eod_mask_loss=config.data.eod_mask_loss,
            ),
            vocab_size=run.vocab_size,
            dataloader_type=order,
            pin_memory=run.device.type == "cuda",
        )
    )


def _train_batches(run: Run, datasets: Datasets, progress: Progress) -> Iterator[Batch]:
    if datasets.train is None:
        if run.config.training.skip_train or not run.config.training.train_iters:
            return iter(())
        raise DataError(
            f"--split {run.config.data.split}: no document is left for training; give it a share or more data"
        )
    order = run.config.data.dataloader_type
    return _batches(run, datasets.train, progress.consumed_train_samples, order=order)


def _evaluator(run: Run, plan: BatchPlan, engine: Engine, datasets: Datasets, hooks: list[Hook]) -> SplitEvaluator:
    def source(dataset: Any) -> BatchSource | None:
        return None if dataset is None else lambda consumed: _batches(run, dataset, consumed)

    return SplitEvaluator(
        engine,
        valid=source(datasets.valid),
        test=source(datasets.test),
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
        flops = flops_per_token(run.config.model, seq_length=seq_length, padded_vocab_size=run.padded_vocab_size)
    return Throughput(
        seq_length=seq_length,
        world_size=run.launch.world_size,
        flops_per_token=flops,
        peak_flops=peak_flops(device_name(run.device), run.config.precision.params_dtype),
    )

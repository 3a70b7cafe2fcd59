"""The model of a run as this rank holds it: split, cut into stages, placed, and with its initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.config.stages import StageLayers, split_layers
from megatron.data_parallel import broadcast_parameters
from megatron.distributed.shard import ShardSpec
from megatron.distributed.state import ParallelState
from megatron.distributed.wgrad_queue import WgradQueue
from megatron.engine import Batch, ForwardStep, Passes
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.parallelize import foreign_specs, gpt_specs, initialise_gpt, split_tensors
from megatron.parallelize.context import share_sequence
from megatron.parallelize.experts import share_experts
from megatron.parallelize.pipeline import (
    held_by_rank,
    held_specs,
    hidden_step,
    queue_weight_gradients,
    stages_of_rank,
)
from megatron.pipeline_parallel.pipeline import Pipeline
from megatron.pipeline_parallel.schedules import SCHEDULES
from megatron.pipeline_parallel.trace import StepTrace
from megatron.training.initialize import Run, layout_of


@dataclass(frozen=True)
class BuiltModel:
    model: nn.Module
    """What this rank holds, under the names of the whole model."""
    specs: Mapping[str, ShardSpec]
    passes: Passes | None = None
    """How batches go through it; None is one model, one pass."""
    wgrad_queue: WgradQueue | None = None


def build_model(run: Run, model_provider: Callable[[Run], nn.Module], forward_step: ForwardStep) -> BuiltModel:
    """In its dtype on its device, with the initial values that (seed, name) decides."""
    # A model that will be split is made without memory first: no rank could hold the whole.
    split = run.parallel.model.size > 1 or run.parallel.ep.size > 1
    model = _in_dtype_and_device(run, model_provider, torch.device("meta") if split else run.device)
    if isinstance(model, GPT):
        built = _parallel_gpt(run, model, forward_step)
        _initialise(run, built)
    elif split or run.parallel.cp.size > 1:
        raise ConfigError(
            "--tensor-model-parallel-size, --pipeline-model-parallel-size and --context-parallel-size split our GPT "
            f"alone, and the model provider gave a {type(model).__name__}; use data parallelism, or split it with the "
            "layers of megatron.tensor_parallel"
        )
    else:
        built = BuiltModel(model, foreign_specs(model))
        broadcast_parameters(model.named_parameters(), run.parallel.dp)
        broadcast_parameters(model.named_buffers(), run.parallel.dp)
    if run.config.kernels.compile:
        _compile_layers(built.model)
    count = sum(parameter.numel() for parameter in built.model.parameters())
    whose = " on this rank" if split else ""
    run.log.info(f"number of parameters{whose}: {count} ({run.config.precision.params_dtype})")
    return built


def _compile_layers(model: nn.Module) -> None:
    """Layer by layer: all have one shape, so that one compilation serves them all, and names stay as they are."""
    if not isinstance(model, GPT):
        raise ConfigError(
            f"--compile compiles the layers of our GPT, and the model provider gave a {type(model).__name__}; "
            "leave --compile out, and call its own .compile() in the provider"
        )
    for layer in model.layers.values():
        layer.compile(dynamic=False)


def held_parameters(run: Run, model_provider: Callable[[Run], nn.Module], rank: int) -> int:
    """How many `rank` will hold, padding included. Nothing is allocated, and no other rank is asked."""
    parallel = ParallelState.plan(layout_of(run.config, run.launch.world_size), rank)
    planned = replace(run, parallel=parallel, device=torch.device("meta"))
    model = _in_dtype_and_device(planned, model_provider, planned.device)
    if isinstance(model, GPT):
        model = _parallel_gpt(planned, model, lambda *_: (torch.zeros(()), torch.zeros(()))).model
    return sum(parameter.numel() for parameter in model.parameters())


def _in_dtype_and_device(run: Run, model_provider: Callable[[Run], nn.Module], device: torch.device) -> nn.Module:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(run.dtype)
    try:
        with torch.device(device):
            return model_provider(run).to(device=device, dtype=run.dtype)
    finally:
        torch.set_default_dtype(previous)


def _parallel_gpt(run: Run, model: GPT, forward_step: ForwardStep) -> BuiltModel:
    parallel, config = run.parallel, run.config.parallel
    sequence_parallel = config.sequence_parallel
    specs: Mapping[str, ShardSpec] = gpt_specs(
        model,
        run.config.model,
        run.vocab_size,
        moe=run.config.moe,
        tp=parallel.tp,
        padded_vocab_size=run.padded_vocab_size,
        sequence_parallel=sequence_parallel,
    )
    share_sequence(model, parallel.cp, config.cp_attention)
    share_experts(model, parallel, sequence_parallel=sequence_parallel)
    if parallel.model.size == 1 and parallel.ep.size == 1:
        return BuiltModel(model, specs)
    layers = stage_layers(run)
    held = held_by_rank(model, layers, parallel.pp.rank)
    specs = held_specs(specs, held, parallel.pp)
    split_tensors(held, specs, parallel.tp, sequence_parallel=sequence_parallel, device=run.device)
    if parallel.pp.size == 1:
        return BuiltModel(held, specs)
    queue = WgradQueue() if config.schedule == "zero-bubble" else None
    if queue is not None:
        queue_weight_gradients(held, queue)
    pipeline = Pipeline(
        stages_of_rank(held, layers, parallel.pp.rank),
        parallel.pp,
        SCHEDULES[config.schedule],
        loss_step=forward_step,
        hidden_step=hidden_step,
        hidden_like=_hidden_like(run),
        wgrad_queue=queue,
        links=parallel.pp_links,
    )
    if config.pipeline_trace is not None:
        pipeline.trace = StepTrace()
    return BuiltModel(held, specs, pipeline, queue)


def stage_layers(run: Run) -> StageLayers:
    config = run.config.parallel
    return split_layers(
        run.config.model.num_layers,
        run.parallel.pp.size,
        layers_per_chunk=config.num_layers_per_virtual_pipeline_stage,
        first=config.decoder_first_pipeline_num_layers,
        last=config.decoder_last_pipeline_num_layers,
    )


def _hidden_like(run: Run) -> Callable[[Batch], tuple[tuple[int, ...], Tensor]]:
    """The hidden states between two stages: [batch, seq, hidden], or this rank's piece of the sequence."""
    pieces = run.parallel.tp.size if run.config.parallel.sequence_parallel else 1
    wide = run.config.model.fp32_residual_connection and run.dtype != torch.float64
    like = torch.empty(0, dtype=torch.float32 if wide else run.dtype, device=run.device)

    def shape(batch: Batch) -> tuple[tuple[int, ...], Tensor]:
        samples, tokens = batch["tokens"].shape
        return (samples, tokens // pieces, run.config.model.hidden_size), like

    return shape


def _initialise(run: Run, built: BuiltModel) -> None:
    if run.config.checkpoint.perform_initialization:
        initialise_gpt(built.model, built.specs, run.config.model, run.config.training.seed)
    elif not run.config.checkpoint.load:
        raise ConfigError("--no-initialization: the weights must come from somewhere; give --load")

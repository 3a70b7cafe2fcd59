"""The model of a run as this rank holds it: made by the provider, parallelized, and with its initial values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron.data_parallel import broadcast_parameters
from megatron.distributed.state import ParallelState
from megatron.errors import ConfigError
from megatron.model.flops import flops_per_token
from megatron.model.gpt import GPT
from megatron.model.passes import ForwardStep
from megatron.parallelize import Parallel, await_weights, held_parameters, initialise_part, is_plain, parallelize
from megatron.training.initialize import Run
from megatron.utils.dtype import default_dtype

ModelProvider = Callable[[Run], nn.Module]


def build_model(
    run: Run, model_provider: ModelProvider, forward_step: ForwardStep, *, loaded_next: bool = False
) -> Parallel:
    """In its dtype on its device, with the initial values that seed and names decide; without, if a checkpoint that is
    there is loaded next."""
    # Of a model that is divided the provider's is a description, without memory: no rank could hold the whole.
    described = _provided(run, model_provider, run.device if is_plain(run.parallel) else torch.device("meta"))
    built = parallelize(described, run.config.parallel, run.parallel, forward_step, device=run.device, dtype=run.dtype)
    _initialise(run, built, loaded_next)
    if run.config.kernels.compile:
        _compile_layers(built.model)
    count = sum(parameter.numel() for parameter in built.model.parameters())
    whose = " on this rank" if run.parallel.model.size > 1 or run.parallel.ep.size > 1 else ""
    run.log.info(f"number of parameters{whose}: {count} ({run.config.precision.params_dtype})")
    return built


def count_parameters(run: Run, model_provider: ModelProvider, rank: int) -> int:
    """How many `rank` will hold, padding included. Nothing is allocated, and no other rank is asked."""
    state = ParallelState.plan(run.config.parallel.layout(run.launch.world_size), rank)
    return held_parameters(_provided(run, model_provider, torch.device("meta")), run.config.parallel, state)


def model_flops(run: Run, model: nn.Module) -> float | None:
    """Of training on one token; None for a model that is not our GPT: we do not guess."""
    if not isinstance(model, GPT):
        return None
    return flops_per_token(
        run.config.model,
        seq_length=run.config.data.seq_length,
        padded_vocab_size=run.padded_vocab_size,
        moe=run.config.moe,
    )


def _provided(run: Run, model_provider: ModelProvider, device: torch.device) -> nn.Module:
    with default_dtype(run.dtype), device:
        return model_provider(run).to(device=device, dtype=run.dtype)


def _initialise(run: Run, built: Parallel, loaded_next: bool) -> None:
    if not isinstance(built.model, GPT):  # its provider has set its weights, on every rank others
        broadcast_parameters(built.model.named_parameters(), run.parallel.dp)
        broadcast_parameters(built.model.named_buffers(), run.parallel.dp)
    elif run.config.checkpoint.perform_initialization and not loaded_next:
        initialise_part(built.model, built.specs, built.model.table(), run.config.training.seed)
    elif not run.config.checkpoint.load:
        raise ConfigError("--no-initialization: the weights must come from somewhere; give --load")
    else:
        await_weights(built.model, built.specs)


def _compile_layers(model: nn.Module) -> None:
    """Layer by layer: all have one shape, so that one compilation serves them all, and names stay as they are."""
    if not isinstance(model, GPT):
        raise ConfigError(
            f"--compile compiles the layers of our GPT, and the model provider gave a {type(model).__name__}; "
            "leave --compile out, and call its own .compile() in the provider"
        )
    for layer in model.layers.values():
        layer.compile(dynamic=False)

"""Builds this rank's part of the model: made by the provider, parallelized, initialised."""

from collections.abc import Callable

import torch
from torch import nn

from megatron.config import MoEConfig
from megatron.config.stages import stage_layers
from megatron.data_parallel import broadcast_parameters
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.model.flops import flops_per_token
from megatron.model.gpt import GPT
from megatron.model.passes import ForwardStep
from megatron.parallelize import (
    Parallel,
    await_weights,
    divide_weights,
    held_parameters,
    initialise_part,
    is_plain,
    parallelize,
)
from megatron.training.initialize import Run
from megatron.utils.dtype import cast_floats, default_dtype, refuse_complex

ModelProvider = Callable[[Run], nn.Module]


def build_model(
    run: Run, model_provider: ModelProvider, forward_step: ForwardStep, *, loaded_next: bool = False
) -> Parallel:
    """Builds the model in its dtype on its device. Seed and names decide the initial values. They are not computed if a
    checkpoint is loaded next."""
    on_host = run.config.parallel.parameters_on_host and run.device.type != "cpu"
    divides = run.config.parallel.zero >= 2 and (run.parallel.shard.size > 1 or on_host)
    place = torch.device("cpu") if on_host else run.device
    built = _whole_part(run, model_provider, forward_step, place, without_weights=divides)
    if not isinstance(built.model, GPT):  # its provider set the weights, which may differ between ranks
        for tensors in (built.model.named_parameters(), built.model.named_buffers()):
            broadcast_parameters(tensors, run.parallel.dp, through=run.device)
    if divides:
        built = divide_weights(built, run.parallel, run.config.parallel.zero, run.device, on_host=on_host)
    if isinstance(built.model, GPT):
        _initialise(run, built, built.model, loaded_next)
    if run.config.kernels.compile:
        _compile_layers(built.model)
    count = sum(parameter.numel() for parameter in built.model.parameters())
    whose = " on this rank" if run.parallel.model.size > 1 or run.parallel.ep.size > 1 else ""
    run.log.info(f"number of parameters{whose}: {count} ({run.config.precision.params_dtype})")
    return built


def count_by_stage(run: Run, model: nn.Module, moe: MoEConfig | None = None) -> list[int]:
    """Number of parameters on a rank of each pipeline stage. Stages with the same kinds of layers hold equally many and
    are counted once. `moe`: all experts, if `model` was built with fewer."""
    config, total = run.config.parallel, run.config.model.num_layers
    layout = config.layout(run.launch.world_size)
    ranks = layout.group_of("pp", 0)
    if layout.pp == 1:
        return [held_parameters(model, config, ParallelState.plan(layout, 0), moe)]
    layers, experts = stage_layers(total, config), set(run.config.moe.expert_layers(total))
    known: dict[tuple[bool, bool, int, int], int] = {}
    counts = []
    for stage, rank in enumerate(ranks):
        held = [layer for part in layers.of_rank(stage) for layer in part]
        kind = (stage == 0, stage == layout.pp - 1, len(held), sum(layer in experts for layer in held))
        if kind not in known:
            known[kind] = held_parameters(model, config, ParallelState.plan(layout, rank), moe)
        counts.append(known[kind])
    return counts


def model_flops(run: Run, model: nn.Module) -> float | None:
    """FLOPs of training on one token; None for a model other than the package's GPT."""
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
        model = model_provider(run)
        refuse_complex(model, "the model provider's model")
        return cast_floats(model, run.dtype).to(device)


def _whole_part(
    run: Run, model_provider: ModelProvider, forward_step: ForwardStep, place: torch.device, *, without_weights: bool
) -> Parallel:
    """Builds this rank's part, not yet divided by ZeRO. With `without_weights`, a GPT's weights stay on the
    meta device, because no rank could hold them all, and another model's weights go to `place`."""
    # A model that will be split over ranks is provided on the meta device, as a description. One that only ZeRO will
    # divide is provided on the host, where memory is not committed until it is written.
    split = not is_plain(run.parallel)
    meta, host = torch.device("meta"), torch.device("cpu")
    described = _provided(run, model_provider, meta if split else host if without_weights else run.device)
    if without_weights and not split:
        described = described.to(device=meta if isinstance(described, GPT) else place)
    return parallelize(
        described,
        run.config.parallel,
        run.parallel,
        forward_step,
        device=run.device,
        dtype=run.dtype,
        made_on=meta if without_weights else None,
    )


def _initialise(run: Run, built: Parallel, model: GPT, loaded_next: bool) -> None:
    if run.config.checkpoint.perform_initialization and not loaded_next:
        initialise_part(built.parts(), model.table(), run.config.training.seed)
    elif not run.config.checkpoint.load:
        raise ConfigError("--no-initialization: the weights are then undefined; give --load")
    else:
        await_weights(built.parts())


def _compile_layers(model: nn.Module) -> None:
    """Compiles layer by layer: all have the same shape, so they share one compilation, and names do not change."""
    if not isinstance(model, GPT):
        raise ConfigError(
            f"--compile: supports only the package's GPT, but the model provider returned a {type(model).__name__}; "
            "remove --compile, and call the model's .compile() in the provider"
        )
    for layer in model.layers.values():
        layer.compile(dynamic=False)

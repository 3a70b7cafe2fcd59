"""Builds the engine of a model: its gradient buffers, optimizer, replica sums, and what its kernels and device need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.data_parallel import GradBuffers
from megatron.distributed.state import Axis, ParallelState
from megatron.engine.engine import Engine
from megatron.engine.graphs import GraphedPasses
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.model.parameters import Row
from megatron.model.passes import Passes, SinglePass
from megatron.ops.select import Kernels
from megatron.optimizer import GroupRule, Optimizer, megatron_rule
from megatron.parallelize import Parallel
from megatron.utils.cuda import CudaGraph


def build_engine(
    config: RunConfig, built: Parallel, parallel: ParallelState, kernels: Kernels, device: torch.device
) -> Engine:
    """`built` is what `parallelize` made of the model for this rank."""
    model, specs = built.model, built.specs
    experts = [name for name, row in built.rows.items() if row.kind == "expert"]
    grads = GradBuffers(
        model.named_parameters(),
        parallel.dp_cp,
        axes=dict.fromkeys(experts, parallel.expert_dp),
        overlap=config.parallel.overlap_grad_reduce,
        flat=config.kernels.cuda_graphs or any((kernels.adamw, kernels.wgrad_accumulation)),
        accumulate=kernels.wgrad_accumulation,
    )
    if built.wgrads.deferred or kernels.wgrad_accumulation is not None:
        built.wgrads.connect(grads, model)
    dense, shared = _norm_axes(parallel)
    optimizer = Optimizer(
        grads,
        config.optimizer,
        config.precision,
        rule=_decay_by_row(built.rows, norms_of_qk=config.optimizer.apply_wd_to_qk_layernorm),
        split_over=dict.fromkeys(specs, dense) | dict.fromkeys(experts, shared),
        norm_axes=(dense, shared),
        specs=specs,
        kernels=kernels,
        asynchronous=runs_ahead(device),
    )
    return Engine(
        built,
        _graphed(built.passes, model, grads, device) if config.kernels.cuda_graphs else built.passes,
        grads,
        optimizer,
        parallel,
        device=device,
        stop_on_nonfinite=config.training.check_for_nan_in_loss_and_grad,
    )


def runs_ahead(device: torch.device) -> bool:
    """Whether steps are asynchronous: handed over while earlier ones are still computed."""
    return device.type == "cuda"


def _decay_by_row(rows: Mapping[str, Row], *, norms_of_qk: bool) -> Callable[[str, nn.Parameter], GroupRule]:
    """The table says which parameters decay; of a model that is not ours, Megatron's rule does."""

    def rule(name: str, parameter: nn.Parameter) -> GroupRule:
        row = rows.get(name)
        if row is None:
            return megatron_rule(name, parameter)
        decays = row.decays or (norms_of_qk and row.is_qk_norm)
        return GroupRule(wd_mult=1.0 if decays else 0.0)

    return rule


def _graphed(passes: Passes, model: nn.Module, grads: GradBuffers, device: torch.device) -> GraphedPasses:
    assert device.type == "cuda", "checked when the device was chosen"
    if not isinstance(model, GPT):
        raise ConfigError(
            f"--cuda-graphs: records our GPT alone, and the model provider gave a {type(model).__name__}; leave it out"
        )
    assert isinstance(passes, SinglePass), "the settings refuse graphs of a pipeline"
    return GraphedPasses(passes, grads, partial(CudaGraph, device))


def _norm_axes(parallel: ParallelState) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes that a norm is summed over: that of parameters split over a model's ranks, and that of experts."""
    dense = (parallel.model,) if parallel.model.size > 1 else ()
    return dense, (*dense, parallel.ep) if parallel.ep.size > 1 else dense

"""Assembles the engine of a model: store, optimizer, replica sums, and adaptations to kernels and device."""

from functools import partial

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.data_parallel import BucketStore, TrainingStore, bucket_size
from megatron.distributed.parallel_state import ParallelState
from megatron.engine.engine import Engine
from megatron.engine.graphs import GraphedPasses
from megatron.engine.groups import Groups, check_marked
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.model.passes import Passes, SinglePass
from megatron.ops.select import Kernels
from megatron.optimizer import Optimizer, offloads
from megatron.parallelize import Parallel, split_axes
from megatron.utils.cuda import CudaGraph
from megatron.utils.device_kind import kind_of


def build_engine(
    config: RunConfig, built: Parallel, parallel: ParallelState, kernels: Kernels, device: torch.device
) -> Engine:
    """Builds the engine. `built`: result of `parallelize` for this rank's model."""
    model, specs = built.model, built.specs
    store: TrainingStore = built.divided or _open_store(config, built, parallel, kernels, device)
    check_marked(config.optimizer, built)
    dense, shared = ([parallel.axis(name) for name in names] for names in split_axes(parallel))
    optimizer = Optimizer(
        store,
        config.optimizer,
        config.precision,
        rule=Groups(config.optimizer, built.rows, specs, parallel).of,
        split_over={name: tuple(map(parallel.axis, spec.split_over)) for name, spec in specs.items()},
        norm_axes=[
            (*split, divided) if config.parallel.zero and divided.size > 1 else tuple(split)
            for split, divided in ((dense, parallel.shard), (shared, parallel.expert_shard))
        ],
        specs=specs,
        kernels=kernels,
        asynchronous=runs_ahead(device),
    )
    return Engine(
        built,
        _graphed(built.passes, model, store, device) if config.kernels.cuda_graphs else built.passes,
        store,
        optimizer,
        parallel,
        device=device,
        stop_on_nonfinite=config.training.check_for_nan_in_loss_and_grad,
    )


def _open_store(
    config: RunConfig, built: Parallel, parallel: ParallelState, kernels: Kernels, device: torch.device
) -> BucketStore:
    """Opens the store of weights that every data-parallel rank holds whole."""
    divided = config.parallel.zero > 0
    store = BucketStore(
        built.model.named_parameters(),
        parallel.shard if divided else parallel.dp_cp,
        axes=dict.fromkeys(_experts(built), parallel.expert_shard if divided else parallel.expert_dp),
        replicas=parallel.replicate if divided else None,
        bucket_size=bucket_size(config.parallel.ddp_bucket_size, parallel.dp_cp.size),
        overlap=_overlaps(config, device),
        in_own_type=config.parallel.grad_reduce_in_bf16,
        divided=divided,
        late_gather=built.model if config.parallel.overlap_param_gather else None,
        apart=[name for name, spec in built.specs.items() if "embedding" in spec.replica_axes],
        flat=config.kernels.cuda_graphs
        or offloads(config.optimizer, device)
        or any((kernels.adamw, kernels.wgrad_accumulation)),
        accumulate=kernels.wgrad_accumulation,
    )
    if built.wgrads.deferred or kernels.wgrad_accumulation is not None:
        built.wgrads.connect(store, built.model)
    return store


def _overlaps(config: RunConfig, device: torch.device) -> bool:
    """True if gradients are reduced during the backward pass. `overlap-grad-reduce: false` in a file turns it off."""
    parallel = config.parallel
    if parallel.overlap_grad_reduce or parallel.no_overlap_grad_reduce or config.given("overlap_grad_reduce"):
        return parallel.overlap_grad_reduce
    return runs_ahead(device) and not config.kernels.cuda_graphs


def _experts(built: Parallel) -> list[str]:
    return [name for name, row in built.rows.items() if row.kind == "expert"]


def runs_ahead(device: torch.device) -> bool:
    """True if steps are asynchronous: launched while earlier ones are still computed."""
    return kind_of(device.type).asynchronous


def _graphed(passes: Passes, model: nn.Module, store: TrainingStore, device: torch.device) -> GraphedPasses:
    assert kind_of(device.type).graphs, "checked when the device was chosen"
    if not isinstance(model, GPT):
        raise ConfigError(
            f"--cuda-graphs: supports only the package's GPT, not a {type(model).__name__}; remove the flag"
        )
    assert isinstance(store, BucketStore), "the settings reject graphs of gathered weights"
    assert isinstance(passes, SinglePass), "the settings reject graphs of a pipeline"
    return GraphedPasses(passes, store, partial(CudaGraph, device))

"""Sums the gradients of replicated parameters whose replicas saw different inputs.

The sum is over the axes in `Shard.replica_axes`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.state.shard import Shard, split_shape


class ReplicaSums:
    """Sums the gradients of one model's replicas. Called once per step, after the data-parallel reduction."""

    def __init__(self, specs: Mapping[str, Shard], state: ParallelState) -> None:
        self._by_axis: dict[str, list[Shard]] = {}
        self._axes: dict[str, Axis] = {}
        for spec in specs.values():
            for name in spec.replica_axes:
                axis = state.axis(name)
                if axis.size > 1:
                    self._axes[name] = axis
                    self._by_axis.setdefault(name, []).append(spec)

    @torch.no_grad()
    def __call__(self, grads: TrainingStore) -> None:
        for name, specs in self._by_axis.items():
            by_dtype: dict[torch.dtype, list[Shard]] = {}
            for spec in specs:
                by_dtype.setdefault(grads.grad(spec.name).dtype, []).append(spec)
            for some in by_dtype.values():
                _sum_together(grads, some, self._axes[name])


def _sum_together(grads: TrainingStore, specs: Sequence[Shard], axis: Axis) -> None:
    """Sums the gradients of `specs` in one all-reduce. Shards that only overlap are sent in the whole parameter's
    shape, with zeros outside the shard. With ZeRO, each rank sums its piece of each gradient. The pieces of all members
    of the axis match, because they divide equal buffers equally."""
    overlapping = axis.name == "tp"  # on other axes all ranks hold the same part
    shards = [_shard(grads, spec.name) if overlapping and spec.ranges is not None else None for spec in specs]
    sent = []
    for spec, shard in zip(specs, shards, strict=True):
        whole = grads.grad(spec.name)
        if shard is not None:
            spec.put(whole := shard.new_zeros(split_shape(spec)), shard)
        sent.append(whole)
    message = torch.cat([whole.reshape(-1) for whole in sent]).to(grads.device)
    collectives.all_reduce(message, axis)
    parts = message.split([whole.numel() for whole in sent])
    for spec, shard, part in zip(specs, shards, parts, strict=True):
        grad = grads.grad(spec.name)
        if shard is None:
            grad.copy_(part.view(grad.shape))
        else:
            spec.view(shard).copy_(spec.take(part))
            grad.copy_(grads.part_of(spec.name, shard))


def _shard(grads: TrainingStore, name: str) -> Tensor:
    """Returns the gradient in the stored shape, zero outside this rank's piece."""
    grad, parameter = grads.grad(name), grads.parameter(name)
    shard = grad.new_zeros(parameter.shape)
    grads.part_of(name, shard).copy_(grad)
    return shard

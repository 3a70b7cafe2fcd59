"""Sums the gradients of replicated parameters whose replicas saw different inputs.

Which parameters these are follows from their specs (`replica_axes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.data_parallel import GradBuffers
from megatron.distributed import collectives
from megatron.distributed.shard import ShardSpec
from megatron.distributed.state import Axis, ParallelState


class ReplicaSums:
    """Called once a step, after the data-parallel reduction."""

    def __init__(self, specs: Mapping[str, ShardSpec], state: ParallelState) -> None:
        self._by_axis: dict[str, list[ShardSpec]] = {}
        self._axes: dict[str, Axis] = {}
        for spec in specs.values():
            for name in spec.replica_axes:
                axis = state.axis(name)
                if axis.size > 1:
                    self._axes[name] = axis
                    self._by_axis.setdefault(name, []).append(spec)

    @torch.no_grad()
    def __call__(self, grads: GradBuffers) -> None:
        for name, specs in self._by_axis.items():
            by_dtype: dict[torch.dtype, list[ShardSpec]] = {}
            for spec in specs:
                by_dtype.setdefault(grads.grad(spec.name).dtype, []).append(spec)
            for some in by_dtype.values():
                _sum_together(some, [grads.grad(spec.name) for spec in some], self._axes[name])


def _sum_together(specs: Sequence[ShardSpec], grads: Sequence[Tensor], axis: Axis) -> None:
    """Sums in one message. Shards that only overlap are sent in the whole parameter's shape, zero outside the shard."""
    differ = axis.name == "tp"  # on other axes everybody holds the same part
    wholes = [
        grad.new_zeros(spec.split_shape) if differ and spec.ranges is not None else grad
        for spec, grad in zip(specs, grads)
    ]
    for spec, grad, whole in zip(specs, grads, wholes):
        if whole is not grad:
            spec.put(whole, grad)
    message = torch.cat([whole.reshape(-1) for whole in wholes])
    collectives.all_reduce(message, axis)
    parts = message.split([whole.numel() for whole in wholes])
    for spec, grad, whole, part in zip(specs, grads, wholes, parts):
        if whole is grad:
            grad.copy_(part.view(grad.shape))
        else:
            spec.view(grad).copy_(spec.take(part))

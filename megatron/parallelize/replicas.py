"""Gradients of parameters that several ranks hold and that each rank saw another part of the work of.

Which these are stands in the specs (`replica_axes`), so nothing has to be kept in a list by hand.
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
    """Called on the gradients once a step, after their sum over the data-parallel ranks."""

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
    """One message. Where the ranks hold different parts that overlap, the parameter travels in its whole shape, zero
    where this rank holds nothing of it."""
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

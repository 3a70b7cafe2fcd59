"""Storage for the gradients of shards, which `fully_shard` accumulates in `parameter.grad` or copies to the host."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_ALIGNED = 4
"""Alignment of a gradient in elements: kernels read packs of four."""


class InOneBuffer:
    """Keeps the gradients as views of one buffer per dtype, made in the first step. Later steps allocate nothing, and
    scaling is one operation."""

    def __init__(self, shards: Mapping[str, nn.Parameter]) -> None:
        """`shards`: DTensors."""
        self._shards = shards
        self._grads: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []

    def grad(self, name: str) -> Tensor:
        """Gradient in the shape of the shard; zero if no backward pass has set it."""
        self._make_buffers()
        return self._grads[name]

    @torch.no_grad()
    def multiply(self, factor: Tensor | float) -> None:
        for buffer in self._buffers:
            buffer.mul_(factor)

    @torch.no_grad()
    def zero(self) -> None:
        self._make_buffers()
        for buffer in self._buffers:
            buffer.zero_()
        for name, grad in self._grads.items():
            parameter = self._shards[name]
            if parameter.grad is None:
                parameter.grad = as_dtensor(grad, parameter)

    @torch.no_grad()
    def sum_over(self, replicas: Axis) -> None:
        """Sums the gradients over the ranks that keep the same shards."""
        for buffer in self._buffers:
            collectives.all_reduce(buffer, replicas)

    def _make_buffers(self) -> None:
        if self._grads or not self._shards:
            return
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in self._shards.items():
            by_dtype.setdefault(parameter.dtype, []).append(name)
        for dtype, names in by_dtype.items():
            locals_ = [local(self._shards[name]) for name in names]
            sizes = [-(-one.numel() // _ALIGNED) * _ALIGNED for one in locals_]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=locals_[0].device)
            self._buffers.append(buffer)
            for name, one, grad in zip(names, locals_, buffer.split(sizes), strict=True):
                self._grads[name] = grad[: one.numel()].view(one.shape)


class OnHost:
    """Keeps the gradients in pinned host memory. The first gradient of a step is copied during the backward pass.
    `fully_shard` waits for a copy only if it adds to an earlier gradient."""

    def __init__(self, shards: Mapping[str, nn.Parameter]) -> None:
        """`shards`: DTensors."""
        self._shards = shards

    @torch.no_grad()
    def grad(self, name: str) -> Tensor:
        parameter = self._shards[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # `from_local` would move it to the device
        return local(parameter.grad)

    @torch.no_grad()
    def multiply(self, factor: Tensor | float) -> None:
        for parameter in self._shards.values():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    def zero(self) -> None:
        for parameter in self._shards.values():
            parameter.grad = None

    def sum_over(self, replicas: Axis) -> None:
        assert replicas.size == 1, "sums over instances require gradients on the device"


@torch.no_grad()
def local(parameter: Tensor) -> Tensor:
    """This rank's rows of a DTensor."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    rows: Tensor = parameter.to_local()
    return rows


def as_dtensor(piece: Tensor, parameter: Tensor) -> "DTensor":
    """DTensor with `piece` as this rank's rows, divided as `parameter` is."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    place = parameter.device_mesh, parameter.placements
    return DTensor.from_local(piece, *place, run_check=False, shape=parameter.shape, stride=parameter.stride())

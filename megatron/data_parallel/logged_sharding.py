"""The collectives of fully_shard, in the log of their axis: a rank that hangs in one is named as in any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed import collectives
from megatron.distributed.state import Axis

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def log_collectives(module: FSDPModule, axis: Axis) -> None:
    """Logs the collectives of this unit, which `fully_shard` divides over `axis`."""
    if axis.size > 1:
        module.set_custom_all_gather(_Gather(axis))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_ReduceScatter(axis))  # type: ignore[arg-type]


class _OwnBuffers:
    """torch takes any object with these methods, and does not publish their base class in all versions."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_OwnBuffers):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return collectives.gather_into(output_tensor, input_tensor, self.axis, async_op=async_op)


class _ReduceScatter(_OwnBuffers):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return collectives.scatter_into(output_tensor, input_tensor, self.axis, op, async_op=async_op)

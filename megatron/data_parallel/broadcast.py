"""Copies the first rank's values to all ranks of an axis."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.utils.dtype import resolved


@torch.no_grad()
def broadcast_parameters(tensors: Iterable[tuple[str, Tensor]], dp: Axis, through: torch.device | None = None) -> None:
    """Copies the first rank's values to the other ranks of the axis, so that all ranks start with the same weights.
    Values are sent on the device `through`; default: each tensor's own device."""
    if dp.size == 1:
        return
    for _, tensor in tensors:
        whole = resolved(tensor.data).contiguous().to(through or tensor.device)
        collectives.broadcast(whole, dp)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(whole)


@torch.no_grad()
def share_buffers(module: nn.Module, dp: Axis) -> None:
    """Broadcasts the module's buffers from the first rank, in one message."""
    if dp.size == 1:
        return
    buffers = sorted(module.buffers(), key=lambda one: -one.element_size())  # keeps every buffer aligned to its dtype
    if not buffers:
        return
    message = torch.cat([collectives.as_bytes(resolved(one).contiguous()) for one in buffers])
    collectives.broadcast(message, dp)
    for buffer, part in zip(buffers, message.split([one.nbytes for one in buffers]), strict=True):
        buffer.copy_(part.view(buffer.dtype).view(buffer.shape))

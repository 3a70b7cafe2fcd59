"""Host memory for copies of tensors, kept from one save to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 64 * 2**20
_ALIGNED = 64


class HostMemory:
    """Gives out the memory of its blocks, piece after piece. Each piece is a tensor with a storage of its own, so that
    a file holds no more than the piece.

    It is allocated once: new pages cost several times what a copy does, and pinned ones more."""

    def __init__(self, *, pinned: bool) -> None:
        """`pinned`: for copies from an accelerator, which then need no wait of the host."""
        self._pinned = pinned
        self._blocks: list[Any] = []  # numpy arrays of bytes
        self._block = self._used = 0

    def begin(self) -> None:
        """What was given out before may be overwritten."""
        self._block = self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in host memory. If the tensor is on an accelerator, the copy is complete after
        `torch.accelerator.synchronize()`."""
        tensor = tensor.detach()
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        copied = self._empty(tensor.shape, tensor.dtype)
        return copied.copy_(tensor, non_blocking=self._pinned)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        count = shape.numel()
        size = -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED
        while self._block < len(self._blocks) and self._used + size > len(self._blocks[self._block]):
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            block = torch.empty(max(size, _BLOCK), dtype=torch.uint8, pin_memory=self._pinned)
            self._blocks.append(block.numpy())
        start, self._used = self._used, self._used + size
        return torch.frombuffer(self._blocks[self._block], dtype=dtype, count=count, offset=start).view(shape)

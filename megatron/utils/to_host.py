"""Asynchronous copies of numbers from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class ToHost:
    """An asynchronous copy of a tensor's current value. `values` waits for the copy, and so only for work launched
    before it, not for work launched since."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = tensor.detach()
        if tensor.device.type == "cpu":
            self._host = self._host.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._event = torch.Event(tensor.device.type)
        self._event.record(torch.accelerator.current_stream(tensor.device))

    def values(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()

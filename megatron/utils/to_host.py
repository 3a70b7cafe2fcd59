"""Numbers on their way from a device to the host, which does not wait for them until it reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class ToHost:
    """A copy of a tensor as it is now. `values` waits until it has arrived: only for what was handed to the device
    before it, not for what was handed over since."""

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

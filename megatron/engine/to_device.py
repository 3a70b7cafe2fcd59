"""Moves the batches of training and evaluation to the device."""

from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel import slice_batch
from megatron.distributed.parallel_state import Axis
from megatron.model.passes import Batch
from megatron.ops.documents import Documents
from megatron.utils.cuda import CopyStream
from megatron.utils.device_kind import kind_of


class ToDevice:
    """Moves a batch to the device and cuts out this rank's part of its sequences. The cut is made on the device,
    because the loader pinned the whole batch: copying an unpinned piece would be a host sync."""

    def __init__(self, device: torch.device, cp: Axis) -> None:
        self._device, self._cp = device, cp
        self._copies = CopyStream(device, self._moved) if kind_of(device.type).copy_stream else None

    def __call__(self, batch: Batch) -> Batch:
        if self._copies is not None:
            return slice_batch(self._copies(batch), self._cp)
        return slice_batch({key: self._moved(value) for key, value in batch.items()}, self._cp)

    def _moved(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, (Tensor, Documents)) else value

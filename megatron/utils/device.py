"""Devices of this process: names, memory, and copies of numbers to the host."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron.utils.device_kind import kind_of


def device_name(device: torch.device) -> str:
    """Product name of the accelerator; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def accelerator_memory(device: torch.device) -> dict[str, int]:
    """Allocated and reserved bytes, now and at most; empty if the device's allocator does not count them."""
    if not kind_of(device.type).memory_history:
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max_allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max_reserved": torch.cuda.max_memory_reserved(device),
    }


def record_memory_history(device: torch.device) -> None:
    """Starts recording allocations with their Python stacks (CUDA only)."""
    if kind_of(device.type).memory_history:
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def end_memory_history(device: torch.device, path: Path) -> None:
    """Writes the recorded allocations for pytorch.org/memory_viz and stops recording."""
    if kind_of(device.type).memory_history:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)


def total_memory(device: torch.device) -> int | None:
    """Bytes of the accelerator's memory; None if its torch plug-in does not report them."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if properties is None else getattr(properties(device), "total_memory", None)


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


class ToHost:
    """An asynchronous copy of a tensor's current value. `values` waits for the copy and for work launched before it,
    but not for work launched later."""

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


class HostLink:
    """Asynchronous copies between a device and the host, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        """Pinned host memory, which asynchronous copies need."""
        return torch.empty(length, dtype=dtype, pin_memory=True)

    def to_host(self, source: Tensor, into: Tensor) -> Callable[[], None]:
        """Starts a copy of `source`, ordered after the work already launched on the device. Returns a function that
        waits for the copy on the host."""
        source.record_stream(self._stream)  # its memory is not reused before it is copied
        return self._copied(source, into).synchronize

    def to_device(self, source: Tensor, into: Tensor) -> Callable[[], None]:
        """Starts a copy. Returns a function that makes later work on the device wait for the copy; the host does not
        wait."""
        into.record_stream(self._stream)  # not reused early, even if nobody waits for the copy
        arrived = self._copied(source, into)
        return lambda: arrived.wait(torch.accelerator.current_stream(self._device))

    def _copied(self, source: Tensor, into: Tensor) -> torch.Event:
        """Launches the copy after the work already on the device, which may use either memory. Returns the event of its
        end."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            into.copy_(source, non_blocking=True)
            end = torch.Event(self._device)
            end.record(self._stream)
        return end

    def join(self) -> None:
        """Makes all later work on the device wait for the copies; the host does not wait."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

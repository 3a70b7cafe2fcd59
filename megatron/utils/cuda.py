"""What CUDA alone offers: graphs, a stream for copies, and an allocator that grows its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class CudaGraph:
    """Work handed to the device once and replayed in one call, with its memory in a pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], object], times: int = 3) -> None:
        """Libraries choose their algorithms and workspaces in the first calls, which cannot be recorded. Dropout's
        stream of random numbers is left as it was found: a resumed run warms up again."""
        state = torch.cuda.get_rng_state(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.set_rng_state(state, self._device)

    def capture(self, work: Callable[[], T]) -> T:
        """Returns what the work returns: tensors that every replay fills anew."""
        # Other threads (the loader's, which pins memory) may go on with calls that a recording does not allow.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class CopyStream:
    """Copies batches to the device beside what it computes; from pinned memory the host does not wait either."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        with torch.cuda.stream(self._stream):
            moved = {key: self._moved(value) for key, value in batch.items()}
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for value in moved.values():
            if isinstance(value, Tensor):
                value.record_stream(current)  # its memory is not given to the next copy while it is still read
        return moved

    def _moved(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value


def grow_segments() -> bool:
    """Lets the allocator extend what it has instead of looking for a larger hole: less memory lost between tensors of
    changing sizes. Before the first allocation. False where this torch has no such setting."""
    settings = "expandable_segments:True"
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    older = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    change = newer or older
    if change is None:
        return False
    try:
        change(settings)
    except RuntimeError:  # a driver or a platform without virtual memory management
        return False
    return True

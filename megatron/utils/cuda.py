"""Features that only CUDA has: graphs, a copy stream, and expandable allocator segments."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CudaGraph:
    """Captures work once and replays it in one call; its memory is in a separate pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], object], times: int = 3) -> None:
        """Runs the work without capturing it, because libraries choose algorithms and workspaces in their first calls.
        Restores the random state, since a resumed run warms up again."""
        state = torch.cuda.get_rng_state(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.set_rng_state(state, self._device)

    def capture(self, work: Callable[[], T]) -> T:
        """Returns the output of the work: tensors that every replay refills."""
        # Other threads (the loader's, which pins memory) may make calls that are not allowed during capture.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class CopyStream:
    """Copies batches to the device concurrently with compute; from pinned memory also without host sync."""

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        """Makes a stream on `device`. `move` starts the copy of a value, and returns any value that it does not copy
        unchanged."""
        self._device, self._stream, self._move = device, torch.cuda.Stream(device), move

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        with torch.cuda.stream(self._stream):
            arrived = {key: self._move(value) for key, value in batch.items()}
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for key, value in arrived.items():
            if value is not batch[key]:
                value.record_stream(current)  # its memory is not reused while it is still being read
        return arrived


def grow_segments(given: str = "") -> bool:
    """Lets the allocator extend its segments, which reduces fragmentation when tensor sizes change. Call before the
    first allocation. Returns False where this torch has no such setting. The user's settings, `given`, are set again,
    because torch forgets some of them when others are set."""
    if "expandable_segments" in given or "backend:" in given:
        return True
    settings = f"{given},expandable_segments:True" if given else "expandable_segments:True"
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


def round_products(to_tf32: bool) -> None:
    """Sets whether fp32 products round their factors to TF32. Also sets False, because a script may have changed this
    setting of the process."""
    torch.backends.cuda.matmul.allow_tf32 = to_tf32

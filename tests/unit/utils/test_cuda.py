"""Calls to torch.cuda, without a GPU: they exist in this torch, and come in the right order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from megatron.utils.cuda import CopyStream, CudaGraph

DEVICE = torch.device("cpu")


class Recorder:
    """A fake torch.cuda that records stream dependencies and graph captures."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.streams = ["current"]
        for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph", "get_rng_state", "set_rng_state"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.Tensor, "record_stream", lambda _, stream: self.events.append(("used by", stream.name)))

    def Stream(self, device: torch.device) -> Stream:
        return Stream("side", self.events)

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self.streams[-1], self.events)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def CUDAGraph(self) -> Recorder:
        return self

    @contextmanager
    def graph(self, graph: Any, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.events.append(("capture", stream.name, capture_error_mode))
        with self.stream(stream):
            yield

    def replay(self) -> None:
        self.events.append("replay")

    def get_rng_state(self, device: torch.device) -> str:
        return "state before"

    def set_rng_state(self, state: str, device: torch.device) -> None:
        self.events.append(("random", state))


class Stream:
    def __init__(self, name: str, events: list[Any]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: Stream) -> None:
        self.events.append((self.name, "waits for", other.name))


def test_a_recording_is_made_where_it_was_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run on one stream, because libraries keep a workspace per stream; dropout's random state is restored."""
    cuda = Recorder(monkeypatch)
    graph = CudaGraph(DEVICE)
    graph.warm_up(lambda: cuda.events.append(("work", cuda.streams[-1])))
    assert graph.capture(lambda: cuda.streams[-1]) == "side"
    graph.replay()
    assert cuda.events == [
        ("side", "waits for", "current"),
        *[("work", "side")] * 3,
        ("current", "waits for", "side"),
        ("random", "state before"),
        ("capture", "side", "thread_local"),
        "replay",
    ]


def test_a_batch_is_copied_beside_the_work_and_not_freed_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Recorder(monkeypatch)
    moved = CopyStream(DEVICE, lambda x: x.clone() if isinstance(x, torch.Tensor) else x)(
        {"tokens": torch.arange(3), "name": "batch"}
    )
    assert moved["tokens"].tolist() == [0, 1, 2] and moved["name"] == "batch"
    assert cuda.events == [("current", "waits for", "side"), ("used by", "current")]


def test_this_torch_has_the_calls_as_they_are_made() -> None:
    state, device = object(), torch.device("cuda", 0)
    inspect.signature(torch.cuda.graph).bind(object(), stream=object(), capture_error_mode="thread_local")
    inspect.signature(torch.cuda.get_rng_state).bind(device)
    inspect.signature(torch.cuda.set_rng_state).bind(state, device)
    inspect.signature(torch.cuda.set_sync_debug_mode).bind("warn")
    inspect.signature(torch.cuda.memory._record_memory_history).bind(max_entries=1)
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("path")
    inspect.signature(torch.cuda.memory.caching_allocator_enable).bind(False)
    inspect.signature(torch.accelerator.current_stream).bind(device)
    inspect.signature(torch.accelerator.empty_cache).bind()
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    # Some versions compute neither on a CPU or on the meta device; a version without the argument raises TypeError.
    half, wide = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(4, 4)
    with suppress(NotImplementedError):
        torch.addmm(wide, half.t(), half, out_dtype=torch.float32, out=wide)
    with suppress(NotImplementedError):
        torch.mm(half.t(), half, out_dtype=torch.float32, out=wide)

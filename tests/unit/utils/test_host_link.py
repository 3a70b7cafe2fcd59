"""Copies between a device and the host, on a device whose streams run as late or as early as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron.utils.device import HostLink

Mark = tuple["Stream", int]
"""(stream, number of its operations)."""


class Device:
    """Streams of operations. An `eager` stream runs an operation as soon as its dependencies are done, another stream
    only when something waits for it. Freed memory goes to the compute stream at once."""

    def __init__(self, *eager: str) -> None:
        self.eager = eager
        self.streams: list[Stream] = []
        self.compute = self.current = Stream(self, "compute")
        self.host_waits = 0

    def allocate(self, value: int) -> Memory:
        return Memory(self, value)

    def work(self, operation: Callable[[], None]) -> None:
        self.compute.add(operation)

    def reuse(self, memory: Memory, value: int) -> None:
        """Frees the memory, and overwrites it on the compute stream. The allocator first waits for the other streams
        recorded for it."""
        for stream in memory.recorded:
            self.compute.wait_stream(stream)
        self.work(lambda: memory.set(value))

    def finish(self) -> None:
        for stream in self.streams:
            stream.run(len(stream.operations))


class Stream:
    def __init__(self, device: Device, name: str = "copies") -> None:
        self.device, self.name, self.done = device, name, 0
        self.operations: list[Callable[[], None]] = []
        device.streams.append(self)

    def add(self, operation: Callable[[], None]) -> None:
        self.operations.append(operation)
        for stream in self.device.streams:
            if stream.name in self.device.eager:
                stream.run(len(stream.operations))

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.operations[self.done - 1]()

    def wait(self, mark: Mark) -> None:
        self.add(lambda: mark[0].run(mark[1]))

    def wait_stream(self, other: Stream) -> None:
        self.wait((other, len(other.operations)))

    def __enter__(self) -> None:
        self.before, self.device.current = self.device.current, self

    def __exit__(self, *_: object) -> None:
        self.device.current = self.before


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        self.mark = (stream, len(stream.operations))

    def wait(self, stream: Stream) -> None:
        if self.mark is not None:  # one that was never recorded holds up nothing
            stream.wait(self.mark)

    def synchronize(self) -> None:
        self.device.host_waits += 1
        if self.mark is not None:
            self.mark[0].run(self.mark[1])


class Memory:
    def __init__(self, device: Device, value: int) -> None:
        self.device, self.value = device, value
        self.recorded: list[Stream] = []

    def set(self, value: int) -> None:
        self.value = value

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream)

    def copy_(self, source: Memory, non_blocking: bool = False) -> None:
        stream = self.device.current
        stream.add(lambda: self.set(source.value))
        if not non_blocking:
            self.device.host_waits += 1
            stream.run(len(stream.operations))


SCHEDULES = [(), ("copies",), ("compute",), ("copies", "compute")]


@contextmanager
def link_to(device: Device, kind: type[HostLink] = HostLink) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.accelerator, "current_stream", lambda device: device.current)
        yield kind(device)  # type: ignore[arg-type]


def to_host(device: Device, link: Any) -> None:
    """The copy has the value of the work before it, whatever comes after."""
    source, into = device.allocate(0), device.allocate(-1)
    device.work(lambda: source.set(1))
    arrived = link.to_host(source, into)
    assert device.host_waits == 0, "nobody waits for the start of a copy"
    device.reuse(source, 2)
    arrived()
    assert into.value == 1 and device.host_waits == 1
    device.finish()
    assert into.value == 1


def to_device(device: Device, link: Any) -> None:
    """Earlier work sees the old value, later work the new one, and the host waits for neither."""
    source, into, seen = device.allocate(1), device.allocate(0), list[int]()
    device.work(lambda: seen.append(into.value))
    arrived = link.to_device(source, into)
    arrived()
    device.work(lambda: seen.append(into.value))
    device.reuse(into, 2)
    assert device.host_waits == 0
    device.finish()
    assert seen == [0, 1] and into.value == 2


def a_copy_that_nobody_waits_for(device: Device, link: Any) -> None:
    """The next owner of the memory keeps its own value."""
    source, into = device.allocate(1), device.allocate(0)
    link.to_device(source, into)
    device.reuse(into, 2)
    device.finish()
    assert into.value == 2 and device.host_waits == 0


def joined(device: Device, link: Any) -> None:
    """Several copies share one wait, on the device."""
    sources, into = [device.allocate(n) for n in (1, 2, 3)], [device.allocate(0) for _ in range(3)]
    seen: list[int] = []
    for source, target in zip(sources, into, strict=True):
        link.to_device(source, target)
    link.join()
    device.work(lambda: seen.extend(target.value for target in into))
    device.finish()
    assert seen == [1, 2, 3] and device.host_waits == 0


USES = [to_host, to_device, a_copy_that_nobody_waits_for, joined]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("eager", SCHEDULES)
def test_values_are_right_however_the_streams_run(use: Callable[[Device, Any], None], eager: tuple[str, ...]) -> None:
    device = Device(*eager)
    with link_to(device) as link:
        use(device, link)


class NoWaitForPresentWork(HostLink):
    def _copied(self, source: Any, into: Any) -> Any:
        with self._stream:
            into.copy_(source, non_blocking=True)
            end = torch.Event(self._device)
            end.record(self._stream)
        return end


class RecordedBeforeTheCopy(HostLink):
    def _copied(self, source: Any, into: Any) -> Any:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            end = torch.Event(self._device)
            end.record(self._stream)
            into.copy_(source, non_blocking=True)
        return end


class OnTheDevicesOwnStream(HostLink):
    def _copied(self, source: Any, into: Any) -> Any:
        into.copy_(source, non_blocking=True)
        end = torch.Event(self._device)
        end.record(self._stream)
        return end


class Blocks(HostLink):
    def _copied(self, source: Any, into: Any) -> Any:
        into.copy_(source)
        return super()._copied(source, into)


class SourceReusedEarly(HostLink):
    def to_host(self, source: Any, into: Any) -> Any:
        return self._copied(source, into).synchronize


class TargetReusedEarly(HostLink):
    def to_device(self, source: Any, into: Any) -> Any:
        arrived = self._copied(source, into)
        return lambda: arrived.wait(torch.accelerator.current_stream(self._device))


class NothingWaits(HostLink):
    def to_device(self, source: Any, into: Any) -> Any:
        super().to_device(source, into)
        return lambda: None


class TheHostWaits(HostLink):
    def to_device(self, source: Any, into: Any) -> Any:
        into.record_stream(self._stream)
        return self._copied(source, into).synchronize


class JoinsNothing(HostLink):
    def join(self) -> None:
        pass


PLANTS = [
    NoWaitForPresentWork,
    RecordedBeforeTheCopy,
    OnTheDevicesOwnStream,
    Blocks,
    SourceReusedEarly,
    TargetReusedEarly,
    NothingWaits,
    TheHostWaits,
    JoinsNothing,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_mistake_is_seen_by_some_use_on_some_schedule(plant: type[HostLink]) -> None:
    seen = []
    for use in USES:
        for eager in SCHEDULES:
            device = Device(*eager)
            with link_to(device, plant) as link:
                try:
                    use(device, link)
                except AssertionError:
                    seen.append((use.__name__, eager))
    assert seen, "no use goes wrong on any schedule"

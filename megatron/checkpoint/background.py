"""Saves in the background: training waits only for the copy to host memory, and a thread writes the files.

    background.start(save, ...)   # Copies; the thread writes, hashes and syncs.
    info = background.poll()      # After every iteration: commits once all ranks have written.
    info = background.finish()    # Before the next save, and at the end: waits.

Background threads call no collectives. Between iterations the training thread exchanges the progress of all ranks. Once
all have written, rank 0 commits the step, again in a thread. An error on one rank is raised on all ranks, between two
iterations.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.content import RankContent
from megatron.checkpoint.run_state import Retention, SavedInfo, Sharded
from megatron.checkpoint.save import Committed, Save
from megatron.distributed.collectives import all_reduce
from megatron.distributed.parallel_state import ParallelState
from megatron.utils.device import ToHost
from megatron.utils.dtype import resolved
from megatron.utils.task import Task

_STOPS_WITHIN = 10.0
"""Time in seconds that a failing run waits for its writing thread to end. Files written so far are not a checkpoint."""


@dataclass
class _Flight:
    """A save in flight."""

    save: Save
    commit: Callable[[], Committed]
    started: float
    blocked: float
    """Seconds that the training waited for the copy."""
    task: Task
    writes: bool = True
    """True while ranks write their files; False while rank 0 commits the step."""
    exchanged: ToHost | None = None
    """Flags exchanged after the last iteration: [1 if a rank failed, 1 if a rank's thread still works]."""
    stop: Event = field(default_factory=Event)


class Background:
    """The background saves of one run. All ranks make the same calls in the same order."""

    def __init__(self, parallel: ParallelState, device: torch.device, *, later: bool) -> None:
        """Stores the settings. If `later`, the progress flags of an iteration are read one iteration later, so that the
        host does not wait for the device."""
        self._parallel, self._device, self._later = parallel, device, later
        self._memory = HostMemory(pinned=device.type != "cpu")
        self._flight: _Flight | None = None

    @property
    def busy(self) -> bool:
        return self._flight is not None

    def start(self, save: Save, retention: Retention) -> SavedInfo | None:
        """Begins `save`; the caller may change its tensors afterwards. Returns a result only if the step is saved
        already."""
        assert self._flight is None, "finish() first"
        started = time.monotonic()
        if (there := save.begin()) is not None:
            return there
        stop = Event()
        try:
            content = run_on_all(lambda: self._copied(save), self._parallel.world)
        except Exception:
            save.give_up()
            raise
        save = _without_tensors(save)
        commit = partial(save.commit, retention)
        task = Task(lambda: save.write(content, stop))
        self._flight = _Flight(save, commit, started, time.monotonic() - started, task, stop=stop)
        return None

    def _copied(self, save: Save) -> RankContent:
        self._memory.begin()
        content = save.content(self._memory.copy)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return content

    def poll(self) -> SavedInfo | None:
        """Returns a step that was just committed, if any. Called every iteration. Waits for files to be written only if
        a rank has failed."""
        flight = self._flight
        if flight is None:
            return None
        mine = [float(flight.task.failed), float(not flight.task.ended)]
        # Filled on the device: a copy from the host would wait for the device.
        flags = torch.stack([torch.full((), number, device=self._device) for number in mine])
        before, flight.exchanged = flight.exchanged, ToHost(all_reduce(flags, self._parallel.world, op="max"))
        readable = before if self._later else flight.exchanged
        if readable is None:
            return None
        with self._parallel.comm_log.read_back("reading how far the ranks have saved"):
            failed, under_way = readable.values()
        return None if under_way and not failed else self._move_on(flight)

    def finish(self) -> SavedInfo | None:
        """Waits until the save in flight is committed."""
        info = None
        while self._flight is not None:
            info = self._move_on(self._flight)
        return info

    def _move_on(self, flight: _Flight) -> SavedInfo | None:
        """Ends the current phase of a save: the writing, after which the commit starts, or the commit. Waits for slower
        ranks and raises their errors. All ranks call it."""
        flight.exchanged = None
        if flight.writes:
            try:
                run_on_all(flight.task.result, self._parallel.world)
            except Exception:
                self._flight = None
                flight.save.give_up()
                raise
            flight.writes = False
            flight.task = Task(flight.commit)
            return None
        self._flight = None
        return flight.save.conclude(flight.task.result, flight.started, flight.blocked)

    def close(self) -> None:
        """Stops the writing thread after an error, which may be on this rank only. A partly written step is not
        committed."""
        if self._flight is not None:
            self._flight.stop.set()
            self._flight.task.wait(_STOPS_WITHIN)


def _without_tensors(save: Save) -> Save:
    """Copies the save without its tensors, so that their memory can be freed while the files are written."""
    nothing, held = torch.empty(0), save.state.optimizer
    params = {name: (shard, nothing) for name, (shard, _) in save.state.params.items()}
    optimizer: dict[str, dict[str, Sharded]] | None = None if held is None else {name: {} for name in held}
    return replace(save, state=replace(save.state, params=params, optimizer=optimizer))


_BLOCK = 64 * 2**20
_ALIGNED = 64


class HostMemory:
    """Host memory for copies of tensors. Each copy has its own storage, so that a file gets only the tensor's bytes.

    Blocks are allocated once and reused. Allocating pages takes several times as long as copying to them, and
    even longer for pinned pages."""

    def __init__(self, *, pinned: bool) -> None:
        """Uses pinned memory if `pinned`, so that copies from an accelerator are asynchronous."""
        self._pinned = pinned
        self._blocks: list[Any] = []  # numpy arrays of bytes
        self._block = self._used = 0

    def begin(self) -> None:
        """Marks all memory as free: new copies may overwrite earlier ones."""
        self._block = self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy in host memory. From an accelerator, it is complete after
        `torch.accelerator.synchronize()`."""
        tensor = resolved(tensor.detach())  # before the copy, which may be asynchronous
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

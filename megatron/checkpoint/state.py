"""What goes into a checkpoint and what comes out of one. Plain values: no part of the run is known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.lock import DirectoryLock
from megatron.distributed.shard import ShardSpec

Sharded = tuple[ShardSpec, Tensor]


@dataclass(frozen=True)
class TrainState:
    """Everything a run is, at a step boundary."""

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    params: Mapping[str, Sharded]
    optimizer: Mapping[str, Mapping[str, Sharded]] | None  # parameter -> {"exp_avg", "exp_avg_sq", "master", ...}
    optimizer_extra: Mapping[str, Any]  # step count, loss scaler: plain values
    scheduler: Mapping[str, Any]  # FORMATS' opt_param_scheduler keys
    rng: Mapping[str, Any] | None  # plain ints and uint8 tensors of this rank
    config: Mapping[str, Any]  # the resolved RunConfig as a plain dict
    args: Mapping[str, Any]  # under Megatron's classic names
    data: Mapping[str, Any]  # integers and dataset fingerprints


@dataclass
class RunHistory:
    """What this run did in its directories: it decides what a save may leave, rename or call newer than us.

    One per run, made by whoever drives it and handed to every load and save.
    """

    run_id: str
    started_from: int = 0  # the iteration at which this run took up training
    loaded: dict[Path, int] = field(default_factory=dict)  # directory -> the step that was resumed from
    committed: dict[Path, set[int]] = field(default_factory=dict)
    bad: dict[Path, set[int]] = field(default_factory=dict)  # found damaged while loading
    locks: dict[Path, DirectoryLock] = field(default_factory=dict)

    def loaded_step(self, directory: Path) -> int | None:
        return self.loaded.get(directory.resolve())

    def committed_steps(self, directory: Path) -> set[int]:
        return self.committed.setdefault(directory.resolve(), set())

    def bad_steps(self, directory: Path) -> set[int]:
        return self.bad.setdefault(directory.resolve(), set())

    def acquire(self, directory: Path) -> DirectoryLock:
        """Hold the save directory until `close`; a second run is refused, naming this one. Call on rank 0 only."""
        key = directory.resolve()
        if key not in self.locks:
            self.locks[key] = DirectoryLock.acquire(key, self.run_id)
        return self.locks[key]

    def close(self) -> None:
        for lock in self.locks.values():
            lock.release()
        self.locks.clear()


@dataclass(frozen=True)
class SavedInfo:
    """What a save did."""

    path: Path
    step: int
    bytes_written: int
    seconds: float
    already_there: bool = False  # this run had loaded or committed the step: nothing was written
    messages: tuple[str, ...] = ()  # what was renamed or deleted on the way; to be logged once


@dataclass(frozen=True)
class LoadedState:
    """What a load gives besides the parameters, which it filled in place."""

    path: Path
    step: int  # of the directory
    iteration: int  # where training goes on: 0 for weights only
    consumed_train_samples: int
    consumed_valid_samples: int
    optimizer: dict[str, dict[str, Tensor]] | None  # in each parameter's stored local shape
    optimizer_extra: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    rng: dict[str, Any] | None
    config: dict[str, Any]
    args: dict[str, Any]
    data: dict[str, Any]
    messages: tuple[str, ...] = ()  # warnings, to be logged once

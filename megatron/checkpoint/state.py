"""What is put into a checkpoint and what comes out of one, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.lock import DirectoryLock
from megatron.checkpoint.paths import MODEL_FILE
from megatron.distributed.shard import ShardSpec
from megatron.distributed.state import ParallelState

Sharded = tuple[ShardSpec, Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The whole state of a run at a step boundary; by default, weights at iteration 0."""

    params: Mapping[str, Sharded]
    config: Mapping[str, Any]  # the resolved RunConfig as a plain dict
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    optimizer: Mapping[str, Mapping[str, Sharded]] | None = None  # parameter -> {"exp_avg", "master", ...}
    optimizer_extra: Mapping[str, Any] = field(default_factory=dict)  # step count, loss scaler: plain values
    scheduler: Mapping[str, Any] = field(default_factory=dict)  # Megatron's opt_param_scheduler keys
    rng: Mapping[str, Any] | None = None  # plain ints and uint8 tensors of this rank
    args: Mapping[str, Any] = field(default_factory=dict)  # under Megatron's classic names
    data: Mapping[str, Any] = field(default_factory=dict)  # integers and dataset fingerprints
    origin: Mapping[str, Any] = field(default_factory=dict)  # of an imported model: what its export gives back


@dataclass
class RunHistory:
    """What this run has loaded, committed and locked, from which a save decides which steps to keep or rename.

    There is one per run, and it is passed to every load and save.
    """

    run_id: str
    started_from: int = 0  # the iteration at which this run started or resumed training
    loaded: dict[Path, int] = field(default_factory=dict)  # directory -> the step that was resumed
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
        """Locks the save directory until `close`; a second run is refused with the name of this one. For rank 0
        only."""
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
    already_there: bool = False  # the step was loaded or committed by this run, so nothing was written
    messages: tuple[str, ...] = ()  # what was renamed or deleted on the way; to be logged once


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """What a load returns besides the parameters, which it fills in place; by default, a load of weights only."""

    path: Path
    step: int  # of the directory
    iteration: int = 0  # where training continues
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    optimizer: dict[str, dict[str, Tensor]] | None = None  # in each parameter's stored local shape
    optimizer_extra: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None


def rank_file(parallel: ParallelState) -> str:
    """The file of this rank's model-parallel coordinates, by Megatron's rule."""
    name = f"mp_rank_{parallel.tp.rank:02d}"
    if parallel.pp.size > 1:
        name += f"_{parallel.pp.rank:03d}"
    if parallel.ep.size > 1:
        name += f"_{parallel.ep.rank:03d}"
    return f"{name}/{MODEL_FILE}"


def axis_sizes(parallel: ParallelState) -> dict[str, int]:
    axes = {"tp": parallel.tp, "cp": parallel.cp, "ep": parallel.ep, "dp": parallel.dp, "pp": parallel.pp}
    return {name: axis.size for name, axis in axes.items()}

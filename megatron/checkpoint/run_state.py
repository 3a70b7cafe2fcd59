"""State that a save takes and a load returns, and the record of a run's saves."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.lineage import Line
from megatron.checkpoint.lock import DirectoryLock
from megatron.checkpoint.paths import MODEL_FILE
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.state.division import Range
from megatron.state.shard import Shard

Sharded = tuple[Shard, Tensor]
Take = Callable[[str, Tensor], None]
"""Function of a parameter's name and the whole tensor. Copies the piece of the parameter that this rank keeps."""

Held = Callable[[str], Range | None]
"""Function from a parameter's name to the elements of its stored tensor that this rank keeps; None means all."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The whole state of a run at a step boundary; by default, weights at iteration 0."""

    params: Mapping[str, Sharded]
    config: Mapping[str, Any]  # the resolved RunConfig as a plain dict
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    optimizer: Mapping[str, Mapping[str, Sharded]] | None = None  # parameter -> {"exp_avg", "master", ...}
    replicas: Mapping[str, Axis] = field(default_factory=dict)  # ranks with equal state, of which each saves a share
    optimizer_extra: Mapping[str, Any] = field(default_factory=dict)  # step count, loss scaler: plain values
    scheduler: Mapping[str, Any] = field(default_factory=dict)  # Megatron's opt_param_scheduler keys
    rng: Mapping[str, Any] | None = None  # plain ints and uint8 tensors of this rank
    args: Mapping[str, Any] = field(default_factory=dict)  # under Megatron's classic names
    data: Mapping[str, Any] = field(default_factory=dict)  # integers and dataset fingerprints
    origin: Mapping[str, Any] = field(default_factory=dict)  # data of an imported model that its export restores
    extra: Mapping[str, Any] = field(default_factory=dict)  # plain values and tensors of a user's script


@dataclass
class RunHistory:
    """Steps that this run has loaded and committed, and its locks. They decide which steps a save keeps or renames.

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

    def newest_step(self, directory: Path) -> int | None:
        """The last step that this run has saved, or else loaded."""
        return max(self.committed_steps(directory), default=self.loaded_step(directory))

    def moved(self, step: int, to: int) -> None:
        """Records that the loaded `step` became iteration `to`. Steps after the smaller of the two do not belong
        to this run."""
        self.started_from = min(step, to)
        if to < step:
            self.loaded.clear()  # this run may still save steps with these numbers

    def acquire(self, directory: Path, flag: str = "--save") -> DirectoryLock:
        """Locks the save directory until `close`. A second run gets an error that names this run. Only rank 0 calls
        it."""
        key = directory.resolve()
        if key not in self.locks:
            self.locks[key] = DirectoryLock.acquire(key, self.run_id, flag)
        return self.locks[key]

    def close(self) -> None:
        for lock in self.locks.values():
            lock.release()
        self.locks.clear()


@dataclass(frozen=True)
class Retention:
    """Rule for the older steps that a save keeps. If both fields are None, it keeps all."""

    last: int | None = None  # number of the newest steps
    interval: int | None = None  # steps that are multiples of this number


@dataclass(frozen=True)
class SavedInfo:
    """Result of a save."""

    path: Path
    step: int
    bytes_written: int
    seconds: float
    already_there: bool = False  # the step was loaded or committed by this run, so nothing was written
    blocked: float | None = None  # seconds that training waited for a save in the background
    line: Line | None = None  # of a non-persistent step
    messages: tuple[str, ...] = ()  # steps that were renamed or deleted; to be logged once


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """Result of a load, without the parameters, which are filled in place. The defaults fit a load of weights only."""

    path: Path
    step: int  # of the directory
    iteration: int = 0  # where training continues
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    optimizer: dict[str, dict[str, Tensor]] | None = None  # in each parameter's stored local shape, or a piece of it
    optimizer_extra: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def writes(parallel: ParallelState) -> bool:
    """True if this rank writes the weights, as the first replica of a parameter does."""
    return parallel.expert_dp.rank == 0


@contextmanager
def in_memory(name: str, target: Tensor, take: Take | None) -> Iterator[Tensor]:
    """Yields the tensor to be filled. If a rank keeps only a piece of a parameter, `target` is on the meta device. Then
    a whole tensor is yielded, which lives until `take` has taken the piece."""
    if not target.is_meta:
        yield target
        return
    assert take is not None, f"no rank takes the piece of {name}"
    whole = torch.zeros_like(target, device="cpu")
    yield whole
    take(name, whole)


def rank_folder(parallel: ParallelState) -> str:
    """The folder of this rank's model-parallel coordinates, by Megatron's rule."""
    name = f"mp_rank_{parallel.tp.rank:02d}"
    if parallel.pp.size > 1:
        name += f"_{parallel.pp.rank:03d}"
    if parallel.ep.size > 1:
        name += f"_{parallel.ep.rank:03d}"
    return name


def rank_file(parallel: ParallelState) -> str:
    """File of this rank's weights, which its first replica writes. With one replica it holds all other state, too."""
    return f"{rank_folder(parallel)}/{MODEL_FILE}"


def share_file(parallel: ParallelState) -> str:
    """File for state that replicas divide or that only this rank has."""
    if parallel.dp_cp.size == 1:
        return rank_file(parallel)
    return f"{rank_folder(parallel)}/distrib_optim_{parallel.expert_dp.rank:05d}.pt"


def axis_sizes(parallel: ParallelState) -> dict[str, int]:
    return {name: parallel.axis(name).size for name in ("tp", "cp", "ep", "dp", "pp")}

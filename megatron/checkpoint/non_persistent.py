"""Non-persistent checkpoints, between two checkpoints of `--save`: only the newest one of each run is kept.

This is the kind "global": one directory that all ranks see, saved and loaded like any other. The folder `local` has
the other kind.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint import manifest, paths, retention
from megatron.checkpoint.all_ranks import do_on_first, run_on_all, run_on_first
from megatron.checkpoint.found_step import FoundStep, Log, verify_together, warn_of_unlisted
from megatron.checkpoint.lineage import Line, name_of, named
from megatron.checkpoint.run_state import RunHistory, TrainState
from megatron.checkpoint.save import Save, held_lock, hold_directory
from megatron.checkpoint.storage import storage_errors, storage_message
from megatron.checkpoint.verify import DamagedCheckpointError, verified_manifest
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError, ConfigError


def _emptied(directory: Path) -> list[str]:
    try:
        retention.keep_only(directory, None)
    except OSError as error:
        return [f"warning: {storage_message('deleting non-persistent checkpoints', directory, error)}"]
    return []


@dataclass(frozen=True)
class _Candidates:
    """Steps that continue this run, the newest first, and the names of all other steps."""

    directories: tuple[Path, ...]
    others: tuple[str, ...]


_FLAG = "--non-persistent-global-ckpt-dir"


@dataclass(frozen=True)
class NonPersistent:
    """The non-persistent checkpoints of the run that saves into `save_directory`."""

    directory: Path
    save_directory: Path
    parallel: ParallelState

    def line(self, history: RunHistory, iteration: int) -> Line:
        """Lineage of a step saved now."""

        def name() -> str:
            held_lock(f"--save {self.save_directory}", self.save_directory, history, iteration)
            with storage_errors("naming the run", self.save_directory):
                return named(self.save_directory)

        return Line(run_on_first(name, self.parallel.world, str), history.newest_step(self.save_directory))

    def save(self, state: TrainState, history: RunHistory, fingerprint: Mapping[str, Any]) -> Save:
        """Prepares a save. All ranks call this and the following methods."""
        line = self.line(history, state.iteration)
        return Save(self.directory, state, self.parallel, history, None, fingerprint, line=line)

    def hold(self, history: RunHistory) -> None:
        """Locks the directory before training. Raises if another run uses it or has left its steps there."""
        hold_directory(self.directory, parallel=self.parallel, history=history, flag=_FLAG)
        do_on_first(self._check_ours, self.parallel.world)

    def _check_ours(self) -> None:
        name = name_of(self.save_directory)
        for step in paths.list_steps(self.directory):
            directory = paths.step_directory(self.directory, step)
            with suppress(CheckpointError):
                line = manifest.read(directory).line
                if line is None or line.save != name:
                    raise ConfigError(
                        f"{_FLAG} {self.directory}: holds {directory.name}, which the run of --save "
                        f"{self.save_directory} did not write; remove it, or give another directory"
                    )

    def steps_here(self) -> list[int]:
        """Steps that this rank sees."""
        return paths.list_steps(self.directory)

    def clear(self) -> list[str]:
        """Deletes all steps, because a newer persistent step was saved. Returns a warning if the deletion fails."""
        return run_on_first(lambda: _emptied(self.directory), self.parallel.world, list[str])

    def newer(self, than: int | None, say: Log, *, check_hashes: bool = True) -> FoundStep | None:
        """Returns the newest valid step that continues from step `than` of the save directory."""
        candidates = run_on_first(lambda: self._candidates(than), self.parallel.world, _Candidates)
        if candidates.others:
            say(
                f"warning: {self.directory} has steps ({', '.join(candidates.others)}) of another run, or steps that "
                f"do not continue from the step loaded from {self.save_directory}: they are skipped"
            )
        for directory in candidates.directories:
            try:
                record = run_on_all(partial(verified_manifest, directory), self.parallel.world)
                if check_hashes:
                    verify_together(directory, record, self.parallel.world)
            except DamagedCheckpointError as error:
                say(f"warning: {error}: this non-persistent checkpoint is skipped")
                continue
            warn_of_unlisted(directory, record, say)
            return FoundStep(directory, record, False, save=self.save_directory)
        return None

    def _candidates(self, than: int | None) -> _Candidates:
        name, found, others = name_of(self.save_directory), [], []
        for step in paths.list_steps(self.directory):
            directory = paths.step_directory(self.directory, step)
            if step <= (than or 0):
                continue
            try:
                ours = name is not None and manifest.read(directory).line == Line(name, than)
            except CheckpointError:
                ours = True  # the verification reports what is wrong
            if ours:
                found.append(directory)
            else:
                others.append(directory.name)
        return _Candidates(tuple(found), tuple(others))

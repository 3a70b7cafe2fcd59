"""Saves a step: writes to a temporary directory, durably and hashed while writing, then commits by one rename.

    Rank 0 locks, sweeps, checks the space and makes the temporary directory. Every rank writes its files.
    Rank 0 writes the manifest, sets newer steps aside, renames (the commit point), writes the tracker and deletes.

After a crash at any point the directory holds the last committed step or the new one, never a mixture. An error on one
rank is raised on all ranks.
"""

import platform
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch

from megatron.checkpoint import classic, manifest, paths, retention, storage
from megatron.checkpoint.all_ranks import do_on_first, run_on_all, run_on_first
from megatron.checkpoint.besides_tensors import encode_values, values_file, values_of_file
from megatron.checkpoint.content import (
    Copy,
    RankContent,
    classic_arguments,
    collect_notes,
    join_notes,
    leave_note,
    plain_copy,
    rank_content,
)
from megatron.checkpoint.lineage import Line
from megatron.checkpoint.lock import DirectoryLock
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.run_state import Retention, RunHistory, SavedInfo, TrainState, axis_sizes, writes
from megatron.checkpoint.storage import FileRecord
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError, StorageError
from megatron.torch_files.writer import write_torch_file
from megatron.utils import durable
from megatron.version import __version__

SaveTokenizer = Callable[[Path], object]
Messages = tuple[str, ...]
_SPACE_FACTOR = 1.2
_BYTES_OF_A_TENSOR, _BYTES_OF_A_RANK = 900, 65_536  # measured, for `bytes_besides`


def save_checkpoint(
    directory: Path,
    state: TrainState,
    *,
    parallel: ParallelState,
    save_tokenizer: SaveTokenizer | None,
    history: RunHistory,
    retain_last: int | None = None,
    retain_interval: int | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    release: bool = False,
    known_as: Path | None = None,
) -> SavedInfo:
    """Commits `state` as one step of `directory`. All ranks call it, at a step boundary.

    A `release` has only weights, under the name that Megatron uses for a model without training state. For
    `fingerprint` see `determinism.py`. The caller renames `directory` to `known_as` later.
    """
    save = Save(directory, state, parallel, history, save_tokenizer, fingerprint or {}, release, known_as=known_as)
    return save_now(save, Retention(retain_last, retain_interval))


def bytes_besides(tensors: int, ranks: int = 1) -> int:
    """Estimates the bytes of a step besides its tensors' values: headers and the manifest's records of each tensor, and
    the random states and settings of each rank."""
    return tensors * _BYTES_OF_A_TENSOR + ranks * _BYTES_OF_A_RANK


def save_now(save: "Save", retention: Retention) -> SavedInfo:
    """Writes and commits a save. All ranks call it, at a step boundary."""
    started, world = time.monotonic(), save.parallel.world
    if (there := save.begin()) is not None:
        return there
    try:
        run_on_all(lambda: save.write(save.content()), world)
    except Exception:
        save.give_up()
        raise
    return save.conclude(lambda: save.commit(retention), started)


def hold_directory(directory: Path, *, parallel: ParallelState, history: RunHistory, flag: str = "--save") -> None:
    """Locks the save directory for this run, so that a second run is rejected before it trains. All ranks call it."""

    def acquire() -> None:
        history.acquire(directory, flag)
        _check_writable(directory, flag)

    do_on_first(acquire, parallel.world)


def held_lock(given: str, directory: Path, history: RunHistory, iteration: int) -> DirectoryLock:
    """Returns the lock of a directory. Raises if the directory was moved or replaced since it was locked."""
    lock = history.acquire(directory)
    if not lock.is_of(directory):
        raise StorageError(
            f"{given}: was moved, removed or replaced while this run was training; iteration {iteration} is "
            "not saved. Earlier steps are where the directory was moved to: move it back, and resume with --load"
        )
    return lock


def _check_writable(directory: Path, flag: str) -> None:
    """Rejects a directory in which the first save would fail, such as an immutable one."""
    if (directory / paths.TRACKER).is_dir():
        raise ConfigError(
            f"{flag} {directory}: {paths.TRACKER} there is a directory, but a save writes a file of that name; "
            f"remove that directory, or give another {flag}"
        )
    with storage.storage_errors("trying to write a checkpoint", directory):
        probe = durable.temporary_of(directory / paths.TRACKER)
        probe.touch(exist_ok=False)
        probe.unlink()


@dataclass(frozen=True)
class Committed:
    """Size of a committed step and messages about it, known to the first rank."""

    size: int
    messages: Messages


@dataclass(frozen=True)
class Save:
    """One save of one run, on one rank."""

    directory: Path
    state: TrainState
    parallel: ParallelState
    history: RunHistory
    save_tokenizer: SaveTokenizer | None
    fingerprint: Mapping[str, Any]
    release: bool = False
    line: Line | None = None
    """Lineage of a non-persistent step; only the newest of these is kept."""
    known_as: Path | None = None

    @property
    def _name(self) -> str:
        return paths.RELEASE if self.release else paths.step_name(self.state.iteration)

    @property
    def _target(self) -> Path:
        return self.directory / self._name

    @property
    def _temporary(self) -> Path:
        return paths.unfinished(self.directory, self._name, self.history.run_id)

    @property
    def _given(self) -> str:
        """The setting that names the directory."""
        flag = "--save" if self.line is None else "--non-persistent-global-ckpt-dir"
        return f"{flag} {self.directory}"

    def begin(self) -> SavedInfo | None:
        """Locks, sweeps and makes the temporary directory. If this run has loaded or committed the step, and the
        step is on disk, returns it instead. All ranks call it."""
        world, step = self.parallel.world, self.state.iteration
        if run_on_first(self._is_done, world, bool):
            return SavedInfo(self._target, step, 0, 0.0, already_there=True)
        need = sum(all_gather_json(self._bytes_to_write(), world, int))
        do_on_first(lambda: self._prepare(need), world)
        return None

    def _is_done(self) -> bool:
        """True if this run has loaded or committed the step. Also writes the tracker if the save failed to do so."""
        step, committed = self.state.iteration, self.history.committed_steps(self.directory)
        known = step == self.history.loaded_step(self.directory) or step in committed
        done = known and not self.release and paths.is_plain_file(self._target / paths.MANIFEST)
        tracker = paths.read_tracker(self.directory)
        if done and step in committed and not tracker.release and (tracker.step is None or tracker.step < step):
            with storage.storage_errors("committing a checkpoint", self.directory):
                paths.write_tracker(self.directory, str(step))
        return done

    def _bytes_to_write(self) -> int:
        """Estimates the bytes that this rank writes: its part of the optimizer's state, and weights if it writes
        any."""
        tensors = [tensor for _, tensor in self.state.params.values()] if writes(self.parallel) else []
        size, written = sum(tensor.numel() * tensor.element_size() for tensor in tensors), len(tensors)
        for name, kinds in (self.state.optimizer or {}).items():
            pieces = any(shard.division is not None for shard, _ in kinds.values())
            axis = self.state.replicas.get(name)
            parts = 1 if axis is None or pieces else axis.size
            if axis is not None or writes(self.parallel):
                size += sum(tensor.numel() * tensor.element_size() for _, tensor in kinds.values()) // parts
                written += len(kinds)
        return size + bytes_besides(written)

    def _prepare(self, need: int) -> None:
        lock = held_lock(self._given, self.directory, self.history, self.state.iteration)
        with storage.storage_errors("preparing a checkpoint", self.directory):
            retention.sweep(self.directory, self.history.run_id, exclusive=lock.exclusive)
            self._check_space(need)
            try:
                durable.make_directory(self._temporary)
            except OSError:
                self._discard()
                raise

    def _check_space(self, need: int) -> None:
        free = storage.free_bytes(self.directory)
        if free < _SPACE_FACTOR * need:
            raise StorageError(
                f"{self._given}: {free} bytes are free, a checkpoint of {need} bytes needs "
                f"{_SPACE_FACTOR} times its size; free space there or give another directory"
            )

    def content(self, copy: Copy = plain_copy) -> RankContent:
        """Copies everything that this rank writes."""
        arguments = classic_arguments(self.state, self.parallel.tp.size)
        if self.save_tokenizer is not None:
            folder = ((self.known_as or self.directory) / self._name / paths.TOKENIZER).resolve()
            arguments |= {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": str(folder)}
        return rank_content(self.state, self.parallel, arguments, copy)

    def write(self, content: RankContent, stop: Event | None = None) -> None:
        """Writes this rank's files, durably and hashed while writing, and leaves a note of them. Calls no collective.
        Raises once `stop` is set."""
        content.check_finite()
        if self.parallel.world.rank == 0 and self.save_tokenizer is not None:
            content.part.files.update(self._write_tokenizer(self.save_tokenizer))
        for file in content.files:
            with storage.storage_errors("writing a checkpoint", self._temporary / file):
                self._write_file(content, file, stop)
        with storage.storage_errors("writing a checkpoint", self._temporary):
            leave_note(self._temporary, self.parallel.world.rank, content.part)

    def _write_file(self, content: RankContent, file: str, stop: Event | None) -> None:
        path, tree, starts = self._temporary / file, content.files[file], {}

        def write(stream: storage.HashingFile) -> None:
            starts.update(write_torch_file(tree, stream, content.storages(file)))

        path.parent.mkdir(exist_ok=True)
        content.written(file, storage.write_durable(path, write, stop=stop), starts)
        values, encoded = values_file(file), encode_values(values_of_file(tree))
        content.part.files[values] = storage.write_durable(self._temporary / values, lambda out: out.write(encoded))
        durable.fsync_directory(path.parent)

    def _write_tokenizer(self, save_tokenizer: SaveTokenizer) -> dict[str, FileRecord]:
        folder = self._temporary / paths.TOKENIZER
        with storage.storage_errors("writing the tokenizer", folder):
            folder.mkdir()
            save_tokenizer(folder)
            durable.fsync_tree(folder)
            written = sorted(path for path in folder.rglob("*") if path.is_file())
            return {path.relative_to(self._temporary).as_posix(): storage.hash_file(path) for path in written}

    def give_up(self) -> None:
        """Discards what was written. All ranks call it."""
        do_on_first(self._discard, self.parallel.world)

    def _discard(self) -> None:
        """Removes the temporary directory and ignores errors. Leftovers are never read, and the next save removes
        them."""
        with suppress(OSError):
            shutil.rmtree(self._temporary)

    def commit(self, retention: Retention) -> Committed:
        """Commits what all ranks have written as a step. A no-op on ranks other than the first. Calls no collective."""
        if self.parallel.world.rank != 0:
            return Committed(0, ())
        try:
            with storage.storage_errors("completing a checkpoint", self._temporary):
                written = collect_notes(self._temporary, range(self.parallel.world.size))
                record = join_notes(self._header(), written)
                storage.write_durable(
                    self._temporary / paths.MANIFEST, lambda file: file.write(manifest.encode(record))
                )
                durable.fsync_directory(self._temporary)
            with storage.storage_errors("committing a checkpoint", self._target):
                messages = self._publish()
        except Exception:
            self._discard()  # a no-op after the rename
            raise
        messages += self._retain(retention)
        return Committed(sum(file.size for file in record.files.values()), tuple(messages))

    def conclude(self, commit: Callable[[], Committed], started: float, blocked: float | None = None) -> SavedInfo:
        """Runs `commit`, records the step on all ranks and describes the save. All ranks call it."""
        done, step = self._committed(commit), self.state.iteration
        self.history.committed_steps(self.directory).add(step)
        seconds = time.monotonic() - started
        return SavedInfo(self._target, step, done.size, seconds, False, blocked, self.line, done.messages)

    def _committed(self, commit: Callable[[], Committed]) -> Committed:
        return run_on_first(commit, self.parallel.world, Committed)

    def _retain(self, kept: Retention) -> list[str]:
        """Deletes old steps. A failure is only a warning, because the new step is committed already."""
        step = self.state.iteration
        try:
            if self.line is not None:
                retention.keep_only(self.directory, step)
                return []
            return retention.retain(self.directory, self.history, kept, tracker_step=step)
        except OSError as error:
            return [f"warning: {storage.storage_message('deleting old checkpoints', self.directory, error)}"]

    def _publish(self) -> list[str]:
        messages: list[str] = []
        if self.line is not None:
            if self._target.exists():  # of another run, or rewound past
                retention.delete(self.directory, self.state.iteration)
        elif not self.release:
            messages = retention.set_aside_newer(self.directory, self.state.iteration, self.history)
        durable.rename(self._temporary, self._target)
        self.history.committed_steps(self.directory).add(self.state.iteration)  # even if the tracker cannot be written
        paths.write_tracker(self.directory, paths.RELEASE if self.release else str(self.state.iteration))
        return messages

    def _header(self) -> Manifest:
        """The manifest without the records of the ranks."""
        holds = {"optimizer": self.state.optimizer, "scheduler": self.state.scheduler, "rng": self.state.rng}
        return Manifest(
            step=self.state.iteration,
            consumed_train_samples=self.state.consumed_train_samples,
            consumed_valid_samples=self.state.consumed_valid_samples,
            run_id=self.history.run_id,
            line=self.line,
            layout={"world": self.parallel.world.size, **axis_sizes(self.parallel)},
            versions={"megatron": __version__, "torch": torch.__version__, "python": platform.python_version()},
            fingerprint=classic.plain(self.fingerprint),
            data=classic.plain(self.state.data),
            origin=classic.plain(self.state.origin),
            config=classic.plain(self.state.config),
            args=classic.plain(classic_arguments(self.state, self.parallel.tp.size)),
            files={},
            model={},
            holds=tuple(name for name, value in holds.items() if value),
        )

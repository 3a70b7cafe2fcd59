"""The save protocol: write to a temporary directory, durably and hashed as written, then commit by one rename.

    lock - sweep - space - temporary directory | every rank writes its file | manifest - set newer steps aside -
    rename (the commit point) - tracker - retention

After a crash at any point the directory holds the last committed step or the new one, never a mixture. An error on one
rank is raised on all ranks.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from megatron import __version__
from megatron.checkpoint import classic, manifest, paths, retention, storage
from megatron.checkpoint.all_ranks import do_on_first, run_on_all, run_on_first
from megatron.checkpoint.content import Records, classic_arguments, merge_records, rank_content
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.state import RunHistory, SavedInfo, TrainState, axis_sizes, rank_file
from megatron.checkpoint.storage import FileRecord
from megatron.distributed.messages import all_gather_json
from megatron.distributed.rng import rng_from_plain, rng_to_plain
from megatron.distributed.state import ParallelState
from megatron.errors import ConfigError, StorageError
from megatron.utils import durable

SaveTokenizer = Callable[[Path], object]
Messages = tuple[str, ...]
_SPACE_FACTOR = 1.2


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
) -> SavedInfo:
    """Commits `state` as one step of `directory`. All ranks call it, at a step boundary.

    `release` writes only weights, under the name that Megatron uses for a model without training state. `fingerprint`
    is described in `determinism.py`.
    """
    started = time.monotonic()
    save = _Save(directory, state, parallel, history, release)
    if run_on_first(save.is_done, parallel.world, bool):
        return SavedInfo(save.target, state.iteration, 0, 0.0, already_there=True)
    written = _write_all(save, save_tokenizer)
    messages = run_on_first(lambda: save.commit(written, fingerprint or {}), parallel.world, Messages)
    messages += run_on_first(lambda: save.retain(retain_last, retain_interval), parallel.world, Messages)
    history.committed_steps(directory).add(state.iteration)
    size = sum(record.size for part in written for record in part.files.values())
    return SavedInfo(save.target, state.iteration, size, time.monotonic() - started, messages=messages)


def hold_directory(directory: Path, *, parallel: ParallelState, history: RunHistory) -> None:
    """Locks the save directory for this run, so that a second run is refused before it trains. All ranks call it."""

    def acquire() -> None:
        history.acquire(directory)
        _check_writable(directory)

    do_on_first(acquire, parallel.world)


def _check_writable(directory: Path) -> None:
    """Refuses a directory in which the first save would fail, such as an immutable one."""
    if (directory / paths.TRACKER).is_dir():
        raise ConfigError(
            f"--save {directory}: {paths.TRACKER} in it is a directory, where a save writes a file of that name; "
            "remove it, or give another --save"
        )
    with storage.storage_errors("trying to write a checkpoint", directory):
        probe = durable.temporary_of(directory / paths.TRACKER)
        probe.touch(exist_ok=False)
        probe.unlink()


@dataclass(frozen=True)
class _Written:
    """What one rank has written, for the manifest."""

    files: dict[str, FileRecord]
    model: Records
    optimizer: dict[str, Records]


def _write_all(save: _Save, save_tokenizer: SaveTokenizer | None) -> list[_Written]:
    """All ranks write; if one fails, nothing is committed and the temporary directory is removed."""
    rng = _gather_rng(save.state, save.parallel)
    need = sum(all_gather_json(save.bytes_to_write(), save.parallel.world, int))
    do_on_first(lambda: save.prepare(need), save.parallel.world)
    try:
        written = run_on_all(lambda: save.write_rank(rng, save_tokenizer), save.parallel.world)
    except Exception:
        do_on_first(save.discard, save.parallel.world)
        raise
    return all_gather_json(written, save.parallel.world, _Written)


def _gather_rng(state: TrainState, parallel: ParallelState) -> list[Any] | None:
    """The random states of the data- and context-parallel ranks, in axis order."""
    entries = all_gather_json({} if state.rng is None else rng_to_plain(state.rng), parallel.dp_cp, dict[str, Any])
    return [rng_from_plain(entry) for entry in entries] if all(entries) else None


@dataclass(frozen=True)
class _Save:
    """One save of one run."""

    directory: Path
    state: TrainState
    parallel: ParallelState
    history: RunHistory
    release: bool

    @property
    def name(self) -> str:
        return paths.RELEASE if self.release else paths.step_name(self.state.iteration)

    @property
    def target(self) -> Path:
        return self.directory / self.name

    @property
    def temporary(self) -> Path:
        return self.directory / f"{paths.TEMPORARY}{self.name}.{self.history.run_id}"

    @property
    def writes(self) -> bool:
        """Whether this rank writes: of the replicas of a parameter, the first one does."""
        return self.parallel.expert_dp.rank == 0

    def is_done(self) -> bool:
        """Whether this run loaded or committed the step, which is then on disk already."""
        step = self.state.iteration
        known = step == self.history.loaded_step(self.directory) or step in self.history.committed_steps(self.directory)
        return known and not self.release and paths.is_plain_file(self.target / paths.MANIFEST)

    def bytes_to_write(self) -> int:
        if not self.writes:
            return 0
        tensors = [tensor for _, tensor in self.state.params.values()]
        for kinds in (self.state.optimizer or {}).values():
            tensors += [tensor for _, tensor in kinds.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def prepare(self, need: int) -> None:
        lock = self.history.acquire(self.directory)
        if not lock.is_of(self.directory):
            raise StorageError(
                f"--save {self.directory}: was moved, removed or replaced while this run was training; iteration "
                f"{self.state.iteration} is not saved, earlier ones are where the directory went. Put it back, and "
                "start again with --load to go on from the last"
            )
        with storage.storage_errors("preparing a checkpoint", self.directory):
            retention.sweep(self.directory, self.history.run_id, exclusive=lock.exclusive)
            free = storage.free_bytes(self.directory)
            if free < _SPACE_FACTOR * need:
                raise StorageError(
                    f"--save {self.directory}: {free} bytes are free, a checkpoint of {need} bytes needs "
                    f"{_SPACE_FACTOR} times its size; free space there or give another directory"
                )
            try:
                durable.make_directory(self.temporary)
            except OSError:
                self.discard()
                raise

    def write_rank(self, rng: list[Any] | None, save_tokenizer: SaveTokenizer | None) -> _Written:
        """Writes this rank's files, durably and hashed as written."""
        files: dict[str, FileRecord] = {}
        if self.parallel.world.rank == 0 and save_tokenizer is not None:
            files |= self._write_tokenizer(save_tokenizer)
        if not self.writes:
            return _Written(files, {}, {})
        file, tp = rank_file(self.parallel), self.parallel.tp.size
        arguments = classic_arguments(self.state, tp)
        if save_tokenizer is not None:
            folder = (self.target / paths.TOKENIZER).resolve()
            arguments |= {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": str(folder)}
        content, model, optimizer = rank_content(self.state, file, arguments, tp=tp, rng=rng)
        path = self.temporary / file
        with storage.storage_errors("writing a checkpoint", path):
            path.parent.mkdir(exist_ok=True)
            files[file] = storage.write_durable(path, lambda stream: torch.save(content, cast(IO[bytes], stream)))
            durable.fsync_directory(path.parent)
        return _Written(files, model, optimizer)

    def _write_tokenizer(self, save_tokenizer: SaveTokenizer) -> dict[str, FileRecord]:
        folder = self.temporary / paths.TOKENIZER
        with storage.storage_errors("writing the tokenizer", folder):
            folder.mkdir()
            save_tokenizer(folder)
            durable.fsync_tree(folder)
            written = sorted(path for path in folder.rglob("*") if path.is_file())
            return {path.relative_to(self.temporary).as_posix(): storage.hash_file(path) for path in written}

    def discard(self) -> None:
        """Best effort: what cannot be removed now is never read, and removed by the next save."""
        with suppress(OSError):
            shutil.rmtree(self.temporary)

    def commit(self, written: list[_Written], fingerprint: Mapping[str, Any]) -> Messages:
        """Commits the written files as a step. Runs on the first rank only."""
        record = self._manifest(written, fingerprint)
        try:
            with storage.storage_errors("completing a checkpoint", self.temporary):
                storage.write_durable(self.temporary / paths.MANIFEST, lambda file: file.write(manifest.encode(record)))
                durable.fsync_directory(self.temporary)
            with storage.storage_errors("committing a checkpoint", self.target):
                messages = self._publish()
        except StorageError:
            self.discard()  # which does nothing once it has been renamed
            raise
        return tuple(messages)

    def retain(self, last: int | None, interval: int | None) -> Messages:
        """The new step is committed already, so failing to delete an old one is only a warning."""
        try:
            return tuple(
                retention.retain(
                    self.directory, self.history, last=last, interval=interval, tracker_step=self.state.iteration
                )
            )
        except OSError as error:
            return (f"warning: {storage.storage_message('deleting old checkpoints', self.directory, error)}",)

    def _publish(self) -> list[str]:
        if self.release:
            messages: list[str] = []
        else:
            messages = retention.set_aside_newer(self.directory, self.state.iteration, self.history)
        durable.rename(self.temporary, self.target)
        paths.write_tracker(self.directory, paths.RELEASE if self.release else str(self.state.iteration))
        return messages

    def _manifest(self, written: list[_Written], fingerprint: Mapping[str, Any]) -> Manifest:
        optimizer_names = {name for part in written for name in part.optimizer}
        holds = {"optimizer": self.state.optimizer, "scheduler": self.state.scheduler, "rng": self.state.rng}
        return Manifest(
            step=self.state.iteration,
            consumed_train_samples=self.state.consumed_train_samples,
            consumed_valid_samples=self.state.consumed_valid_samples,
            run_id=self.history.run_id,
            layout={"world": self.parallel.world.size, **axis_sizes(self.parallel)},
            versions={"megatron": __version__, "torch": torch.__version__, "python": platform.python_version()},
            fingerprint=classic.plain(fingerprint),
            data=classic.plain(self.state.data),
            origin=classic.plain(self.state.origin),
            config=classic.plain(self.state.config),
            args=classic.plain(classic_arguments(self.state, self.parallel.tp.size)),
            files={name: record for part in written for name, record in part.files.items()},
            model=merge_records([part.model for part in written]),
            optimizer={
                name: merge_records([part.optimizer[name] for part in written if name in part.optimizer])
                for name in sorted(optimizer_names)
            },
            holds=tuple(name for name, value in holds.items() if value),
        )

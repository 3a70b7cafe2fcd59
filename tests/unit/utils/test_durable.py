"""Durable files under fault injection: file systems without directory sync or locks, full disks, several writers."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.run_state import RunHistory
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.dataset import IndexedDataset
from megatron.errors import StorageError
from megatron.training.metric_writers import writing_file_of as metrics_writing
from megatron.utils import durable
from megatron.utils.durable import (
    BlockHasher,
    storage_error,
    target_of,
    temporary_of,
    try_lock,
    write_atomically,
    write_once,
    writing,
)
from tests.unit.checkpoint.support import load, loaded_equals, make_params, make_state, save


def directories_cannot_be_synced(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Makes every fsync of a directory fail; returns the descriptors that were tried."""
    tried: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            tried.append(descriptor)
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return tried


def save_checkpoint(folder: Path) -> None:
    names = ("final_layernorm.weight",)
    state = make_state(10, seed=1, names=names)
    history = RunHistory("run")
    save(folder / "checkpoints", state, history)
    history.close()
    assert loaded_equals(folder / "checkpoints", state)
    assert load(folder / "checkpoints", make_params(5, names=names)) is not None


def build_dataset(folder: Path) -> None:
    with IndexedDatasetBuilder(folder / "d", "uint16") as builder:
        builder.add_document([1, 2, 3])
    assert IndexedDataset(folder / "d")[0].tolist() == [1, 2, 3]


def write_file(folder: Path) -> None:
    with writing(folder / "f"):
        write_atomically(folder / "f", [b"new"])
    assert (folder / "f").read_bytes() == b"new"


WRITERS = [save_checkpoint, build_dataset, write_file]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_that_cannot_sync_a_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[[Path], None], number: int
) -> None:
    tried = directories_cannot_be_synced(monkeypatch, number)
    writer(tmp_path)
    assert tried


@pytest.mark.parametrize("writer", WRITERS)
def test_a_directory_sync_that_really_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[[Path], None]
) -> None:
    directories_cannot_be_synced(monkeypatch, errno.EIO)
    with pytest.raises(StorageError, match="Input/output error"):
        writer(tmp_path)


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def chunks() -> Any:
        yield b"new"
        if moment == "write":
            fail()

    if moment != "write":
        monkeypatch.setattr(*((os, "fsync", fail) if moment == "fsync" else (Path, "replace", fail)))
    refused = pytest.raises(StorageError, match=r"f: cannot be written \(No space left on device\); free some space")
    with refused, writing(path):
        write_atomically(path, chunks())
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def test_the_first_of_several_writers_wins_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_once(path, [b"first"])
    write_once(path, [b"second"])
    assert path.read_bytes() == b"first"

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    write_once(path, [b"third"])
    assert path.read_bytes() == b"third" and os.listdir(tmp_path) == ["f"]


def test_a_temporary_name_says_what_it_was_to_become() -> None:
    first, second = temporary_of(Path("a/f.npy")), temporary_of(Path("a/f.npy"))
    assert first != second and first.parent == Path("a")
    assert target_of(first.name) == target_of(second.name) == "f.npy"
    assert [target_of(name) for name in ("f.npy", ".f.tmp", ".tmp-f.1", f"{first.name}x")] == [None] * 4


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "wb") as first, open(tmp_path / "lock", "wb") as second:
        assert try_lock(first.fileno())
        with pytest.raises(BlockingIOError):
            try_lock(second.fileno())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable.fcntl, "flock", flock)
    with open(tmp_path / "lock", "wb") as file:
        assert not try_lock(file.fileno())
    save_checkpoint(tmp_path)
    build_dataset(tmp_path)


BLOCK = 1000


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 25_300])
@pytest.mark.parametrize("piece", [1, 7, 999, 1000, 1001, 5000])
def test_block_checksums_do_not_depend_on_the_pieces(size: int, piece: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()

    def oracle(content: bytes) -> tuple[str, ...]:
        return tuple(hashlib.sha256(content[at : at + BLOCK]).hexdigest() for at in range(0, len(content), BLOCK))

    hasher = BlockHasher(BLOCK)
    for at in range(0, size, piece):
        hasher.update(content[at : at + piece])
        assert hasher.blocks() == oracle(content[: at + piece])  # may be asked for at any time
    assert hasher.blocks() == oracle(content) and hasher.size == size


@pytest.mark.parametrize(
    "number, fix",
    [
        (errno.ENOSPC, "free some space or choose another directory"),
        (errno.EDQUOT, "free some space or choose another directory"),
        (errno.EROFS, "the file system is read-only: choose another directory"),
        (errno.EACCES, "check the directory and its permissions"),
        (errno.EIO, "check the directory and its permissions"),
    ],
)
def test_room_is_asked_for_only_where_it_lacks(number: int, fix: str, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number))
    assert str(storage_error(tmp_path, error)).endswith(f"({os.strerror(number)}); {fix}")
    with pytest.raises(StorageError, match=re.escape(fix)), metrics_writing("--metrics-jsonl", "m.jsonl"):
        raise error

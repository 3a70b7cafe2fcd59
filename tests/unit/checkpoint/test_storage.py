"""Files are synced while they are written; a write that the disk lost is an error, whichever sync reports it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from megatron.checkpoint import storage

PIECE = bytes(2**20)
MANY = 3 * storage.BLOCK_BYTES // len(PIECE)


def write(path: Path, pieces: int = MANY) -> storage.FileRecord:
    return storage.write_durable(path, lambda file: [file.write(PIECE) for _ in range(pieces)])


def test_a_large_file_is_synced_beside_its_writing_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append((threading.current_thread() is threading.main_thread(), os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    record = write(tmp_path / "large")
    assert (record.size, len(record.blocks)) == (MANY * len(PIECE), 3)
    assert synced[-1] == (True, record.size)
    assert any(not on_main and size < record.size for on_main, size in synced), synced
    synced.clear()
    write(tmp_path / "small", pieces=1)
    assert synced == [(True, len(PIECE))]


def test_where_no_thread_can_start_the_end_syncs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert write(tmp_path / "large").size == MANY * len(PIECE)


@pytest.mark.parametrize("pieces", [storage.BLOCK_BYTES // len(PIECE), MANY])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_that_only_one_sync_hears_of_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, pieces: int
) -> None:
    """The system reports a lost write once: to a sync in the thread or to the last one. With one block the thread's
    sync is the last but one, and only the end checks it for errors."""
    calls = iter(range(100))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        at_end = (
            os.fstat(descriptor).st_size == pieces * len(PIECE)
            and threading.current_thread() is threading.main_thread()
        )
        if (failing and at_end) or (not failing and next(calls) == 0):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "large", pieces)

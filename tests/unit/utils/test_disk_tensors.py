"""Tensors in a file: changes in memory are there the next time; reads and writes overlap with the work."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from megatron.errors import StorageError
from megatron.utils.disk_tensors import DiskTensors

LENGTHS = [5, 3, 0, 7, 1, 4096, 9]


def values(tensors: DiskTensors) -> list[list[float]]:
    return [tensor.tolist() for _, tensor in tensors.sweep(changes=False)]


@pytest.mark.parametrize("lengths", [LENGTHS, [4], [2, 2], []])
def test_changes_are_kept(tmp_path: Path, lengths: list[int]) -> None:
    tensors = DiskTensors(tmp_path, lengths, setting="--place")
    expected = [torch.zeros(length) for length in lengths]
    for step in range(4):
        for index, tensor in tensors.sweep():
            change = torch.arange(lengths[index]) * 10**step + index
            tensor.add_(change)
            expected[index].add_(change)
        for _, tensor in tensors.sweep(changes=False):
            tensor.fill_(-1)  # a look changes nothing
        assert values(tensors) == [tensor.tolist() for tensor in expected]
    assert tensors.size == 4 * sum(lengths)
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    tensors.close()


def test_the_next_is_read_and_the_last_is_written_while_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read but the first waits until the previous tensor is in use, each write until the next one is. No read
    overwrites memory that is still to be written."""
    lengths = [4] * 6
    tensors = DiskTensors(tmp_path, lengths, setting="--place")
    used, read = [Event() for _ in lengths], [Event() for _ in range(len(lengths) + 3)]

    def place(offset: int) -> int:
        return offset // (4 * lengths[0])

    def preadv(file: int, data: list[Any], offset: int) -> int:
        assert place(offset) == 0 or used[place(offset) - 1].wait(60), "nobody read ahead"
        read[place(offset)].set()
        return real_read(file, data, offset)

    def pwritev(file: int, data: list[Any], offset: int) -> int:
        assert place(offset) == len(lengths) - 1 or used[place(offset) + 1].wait(60), "the sweep waited for a write"
        assert not read[place(offset) + 3].wait(0.1), "its memory has been read into"
        return real_write(file, data, offset)

    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)
    for index, tensor in tensors.sweep():
        used[index].set()
        tensor.fill_(index)
    assert values(tensors) == [[float(index)] * 4 for index in range(6)]


def test_parts_of_reads_and_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, data, offset: read(file, [data[0][:7]], offset))
    monkeypatch.setattr(os, "pwritev", lambda file, data, offset: write(file, [data[0][:5]], offset))
    tensors = DiskTensors(tmp_path, [9, 4], setting="--place")
    for index, tensor in tensors.sweep():
        tensor.copy_(torch.arange(len(tensor)) + index)
    assert values(tensors) == [list(range(9)), [1, 2, 3, 4]]


def test_a_sweep_that_was_left_before_its_end_is_written_before_the_next_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last writes use the memory that the next sweep reads into."""
    tensors = DiskTensors(tmp_path, [4] * 6, setting="--place")
    real_write = os.pwritev

    def late(file: int, data: list[Any], offset: int) -> int:
        Event().wait(0.1)
        return real_write(file, data, offset)

    monkeypatch.setattr(os, "pwritev", late)
    for index, tensor in tensors.sweep():
        tensor.fill_(index + 1)
        if index == 4:
            break
    assert values(tensors) == [[float(index + 1)] * 4 for index in range(4)] + [[0.0] * 4] * 2


def fails(code: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def test_a_disk_that_is_too_small_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"--place .*: the optimizer's state needs 4\.000 GB .* name another"):
        DiskTensors(tmp_path, [10**9], setting="--place")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"--place .*file.*: cannot be written \(.*\); name another directory"):
        DiskTensors(tmp_path / "file", [3], setting="--place")


@pytest.mark.parametrize(("call", "verb"), [("preadv", "read"), ("pwritev", "written")])
def test_an_error_of_the_disk_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, verb: str
) -> None:
    tensors = DiskTensors(tmp_path, [3, 3], setting="--place")
    monkeypatch.setattr(os, call, fails(errno.EIO))
    with pytest.raises(StorageError, match=rf"could not be {verb} .*resume from the last checkpoint"):
        for _ in tensors.sweep():
            pass
    monkeypatch.undo()
    tensors.close()


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuses(path: Any, flags: int, *mode: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no such files here")
        return opened(path, flags, *mode, **named)

    monkeypatch.setattr(os, "open", refuses)
    tensors = DiskTensors(tmp_path, [3], setting="--place")
    for _, tensor in tensors.sweep():
        tensor.fill_(2)
    assert values(tensors) == [[2, 2, 2]] and list(tmp_path.iterdir()) == []


def test_the_room_is_free_when_nobody_has_the_tensors(tmp_path: Path) -> None:
    """Two runs in one process do not need twice the space."""
    tensors = DiskTensors(tmp_path, LENGTHS, setting="--place")
    assert len(values(tensors)) == len(LENGTHS)
    file = tensors._file
    os.fstat(file)
    del tensors
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)

"""Preprocessing that ends before its time, and goes on: at every operation, by every way to end, bit for bit."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.data.indexed import IndexedDataset
from megatron.data.record import read_record
from megatron.errors import ConfigError, DataError, MegatronError, StorageError
from megatron.preprocess import outputs
from megatron.preprocess.journal import WorkFolder
from megatron.preprocess.run import preprocess
from megatron.preprocess.settings import PreprocessSettings
from megatron.tokenizer import TokenizerSettings
from tests.unit.preprocess.support import Workshop, make_workshop

NULL = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000)
KEYS = ("a", "b")


def quiet(line: str) -> None:
    pass


def corpus(folder: Path, documents: int = 60) -> Path:
    lines = [b'{"a": "%d %d", "b": ["%d", "7 8"]}' % (i, i + 1, i) for i in range(documents)]
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def settings(folder: Path, prefix: str = "out", **changes: Any) -> PreprocessSettings:
    """Segments of a few lines, so that a small input has many."""
    given: dict[str, Any] = {
        "inputs": (str(folder / "in.jsonl"),),
        "output_prefix": str(folder / prefix),
        "tokenizer": NULL,
        "json_keys": KEYS,
        "append_eod": True,
        "workers": 2,
        "segment_bytes": 500,
    }
    return PreprocessSettings(**{**given, **changes})


def files_of(folder: Path, prefix: str = "out") -> dict[str, bytes]:
    return {
        f"{key}{suffix}": (folder / f"{prefix}_{key}_document{suffix}").read_bytes()
        for key in KEYS
        for suffix in (".bin", ".idx")
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


def in_a_child(job: Callable[[], object]) -> int:
    """The exit code of a process that is forked to do it; negative: the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------- killed at every operation

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


def killed_at(operation: int, given: PreprocessSettings) -> int:
    """Runs it in a process that kills itself before its n-th operation on the output's files; a write is torn in half."""

    def job() -> None:
        mine, left = os.getpid(), operation

        def step() -> bool:
            nonlocal left
            left -= os.getpid() == mine
            return left == 0 and os.getpid() == mine

        def die() -> None:
            os.kill(mine, signal.SIGKILL)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in OPERATIONS or "/out" not in str(arguments[0]):
                return
            if event == "open" and arguments[1] is not None and not set("wax+") & set(arguments[1]):
                return
            if step():
                die()

        def torn(stream: Any, block: bytes) -> None:
            if step():
                os.write(stream.fileno(), bytes(block)[: len(block) // 2])
                die()
            stream.write(block)

        def torn_journal(folder: WorkFolder, entry: dict[str, Any]) -> None:
            if step():
                assert folder._journal is not None
                folder._journal.write(b'{"done": {"number"')
                die()
            write(folder, entry)

        write = WorkFolder._write
        sys.addaudithook(hook)
        outputs._write_all = torn  # type: ignore[assignment]
        WorkFolder._write = torn_journal  # type: ignore[method-assign]
        preprocess(given, quiet)

    return in_a_child(job)


def test_killed_at_every_operation_then_resumed(tmp_path: Path) -> None:
    corpus(tmp_path, 30)
    preprocess(settings(tmp_path, "whole"), quiet)
    whole = files_of(tmp_path, "whole")
    operation = 0
    while True:
        operation += 1
        code = killed_at(operation, settings(tmp_path, workers=1))
        if code == 0:
            break
        assert code == -signal.SIGKILL, operation
        for key in KEYS:  # whatever looks like a dataset is one
            prefix = tmp_path / f"out_{key}_document"
            if prefix.with_name(prefix.name + ".idx").exists():
                IndexedDataset(prefix)
                assert files_of_key(tmp_path, key) == files_of_key(tmp_path, key, "whole")
        preprocess(settings(tmp_path, resume=True, workers=1), quiet)
        assert files_of(tmp_path) == whole, operation
        assert len(names(tmp_path)) == 3 * len(KEYS), (operation, names(tmp_path))
        for path in tmp_path.glob("out*"):
            path.unlink()
    assert operation > 40, "the run was killed at many operations"


def files_of_key(folder: Path, key: str, prefix: str = "out") -> list[bytes]:
    return [(folder / f"{prefix}_{key}_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]

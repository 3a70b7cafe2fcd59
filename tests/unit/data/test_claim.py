"""One process per file system builds an index. No rank waits for a dead process, and builds do not queue."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import cache as cache_module
from megatron.data import claim as claim_module
from megatron.data.cache import Arrays, CachePlace, IndexCache, remove_leftovers
from megatron.data.claim import Claim
from megatron.errors import StorageError

CONTEXT = multiprocessing.get_context("fork")
DESCRIPTION = {"kind": "test"}


def arrays() -> Arrays:
    return {"a": np.arange(1000, dtype=np.int32)}


def at_once(count: int, body: Callable[[int], None]) -> None:
    """Runs `body` in processes that must all succeed."""
    workers = [CONTEXT.Process(target=body, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * count


def test_of_eight_processes_one_builds(tmp_path: Path) -> None:
    started = CONTEXT.Barrier(8)

    def rank(number: int) -> None:
        def build() -> Arrays:
            (tmp_path / f"built by {number}").touch()
            time.sleep(0.2)  # the others come meanwhile
            return arrays()

        started.wait(30)
        for seed in range(3):
            got = IndexCache(CachePlace(tmp_path / "c")).load_or_build({**DESCRIPTION, "seed": seed}, build)
            assert np.array_equal(got["a"], arrays()["a"])
            os._exit(7) if seed == 0 and len(list(tmp_path.glob("built by *"))) != 1 else None

    at_once(8, rank)
    assert not list((tmp_path / "c").glob(".*")), "claims go with their holders"


def test_a_killed_builder_is_followed_by_one_that_waits(tmp_path: Path) -> None:
    built = CONTEXT.Queue()

    def rank(number: int) -> None:
        def build() -> Arrays:
            built.put(number)
            if number == 0:
                time.sleep(60)
            return arrays()

        IndexCache(CachePlace(tmp_path)).load_or_build(DESCRIPTION, build)

    workers = [CONTEXT.Process(target=rank, args=(number,)) for number in range(3)]
    workers[0].start()
    assert built.get(timeout=30) == 0
    for worker in workers[1:]:
        worker.start()
    time.sleep(0.3)
    assert built.empty() and all(worker.is_alive() for worker in workers), "they wait for the one that builds"
    workers[0].kill()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0]
    assert built.get(timeout=5) in (1, 2) and built.empty()


def test_an_index_that_cannot_be_stored_is_built_by_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ranks that build one after the other would take days, so the waiting ranks build at once."""

    def full(path: Path, chunks: object, *, sync: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_atomically", full)
    waiting, others = CONTEXT.Barrier(4), CONTEXT.Barrier(3)

    def rank(number: int) -> None:
        def build() -> Arrays:
            if number == 0:
                waiting.wait(30)  # until the others have come
                time.sleep(0.3)
            else:
                others.wait(30)
            return arrays()

        if number:
            time.sleep(0.2)
            waiting.wait(30)
        cache = IndexCache(CachePlace(tmp_path))
        assert np.array_equal(cache.load_or_build(DESCRIPTION, build)["a"], arrays()["a"])
        assert "not stored" in cache.notes[-1]

    at_once(4, rank)


def test_without_locks_everybody_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "try_lock", lambda descriptor: False)
    with Claim(tmp_path / "x.lock") as first, Claim(tmp_path / "x.lock") as second:
        assert first.wait_turn(lambda: None) is None and second.wait_turn(lambda: None) is None


def test_a_claim_in_a_directory_that_cannot_be_written_is_nobody_s(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Claim(tmp_path / "file" / "x.lock") as claim:
        assert claim.wait_turn(lambda: None) is None


def test_a_claim_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("content")
    (tmp_path / "x.lock").symlink_to(tmp_path / "precious")
    with Claim(tmp_path / "x.lock") as claim:
        assert claim.wait_turn(lambda: None) is None
    assert (tmp_path / "precious").read_text() == "content"


def test_whoever_waits_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "_SAID_EVERY", 0.0)
    code = (
        "import pathlib, sys, time; from megatron.data.claim import Claim\n"
        "with Claim(pathlib.Path(sys.argv[1])) as claim: claim.wait_turn(lambda: None); print('mine', flush=True); "
        "time.sleep(60)"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", code, str(tmp_path / "x.lock")]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "mine\n"
        said: list[str] = []
        looks = iter([None, None, "found"])
        with Claim(tmp_path / "x.lock", said.append) as claim:
            assert claim.wait_turn(lambda: next(looks)) == "found"
        holder.kill()
    assert said and f"waiting for process {holder.pid} on " in said[0]


def test_old_claims_of_killed_builders_are_removed(tmp_path: Path) -> None:
    key = "0" * 32
    old, new, other = tmp_path / f".{key}-claim.lock", tmp_path / f".{'1' * 32}-claim.lock", tmp_path / ".mine.lock"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    remove_leftovers(tmp_path)
    assert not old.exists() and new.exists() and other.exists()


def test_an_error_of_the_build_frees_the_claim(tmp_path: Path) -> None:
    def failing() -> Arrays:
        raise StorageError("no such data")

    cache: Any = IndexCache(CachePlace(tmp_path))
    with pytest.raises(StorageError, match="no such data"):
        cache.load_or_build(DESCRIPTION, failing)
    assert np.array_equal(cache.load_or_build(DESCRIPTION, arrays)["a"], arrays()["a"])

"""A cache entry is valid or rebuilt; it never blocks, misleads or executes code."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from megatron.data import cache as cache_module
from megatron.data.cache import Arrays, CachePlace, IndexCache
from megatron.errors import StorageError

DESCRIPTION = {"kind": "test", "seed": 1}


def arrays() -> Arrays:
    return {"a": np.arange(1000, dtype=np.int32), "b": np.arange(6, dtype=np.int64).reshape(3, 2), "c": np.empty(0)}


def load(directory: Path, description: dict[str, object] | None = None) -> tuple[Arrays, bool, list[str]]:
    """(arrays, whether they were built, notes)"""
    built = []

    def build() -> Arrays:
        built.append(1)
        return arrays()

    cache = IndexCache(CachePlace(directory))
    got = cache.load_or_build(DESCRIPTION if description is None else description, build)
    assert got.keys() == arrays().keys()
    for name, array in arrays().items():
        assert got[name].dtype == array.dtype and np.array_equal(got[name], array)
    return got, bool(built), cache.notes


def test_built_once(tmp_path: Path) -> None:
    assert load(tmp_path / "c")[1:] == (True, [])
    assert load(tmp_path / "c")[1:] == (False, [])
    assert load(tmp_path / "c", {"kind": "test", "seed": 2})[1]
    assert not [path for path in (tmp_path / "c").iterdir() if path.suffix == ".tmp"]


def test_large_arrays_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path)
    assert load(tmp_path)[0]["a"].flags.writeable
    monkeypatch.setattr(cache_module, "_MAPPED_FROM", 100)
    got, _, _ = load(tmp_path)
    assert not got["a"].flags.owndata and not got["a"].flags.writeable


def damage(directory: Path, kind: str) -> None:
    npy = next(directory.glob("*-a.npy"))
    marker = next(directory.glob("*description.json"))
    content = npy.read_bytes()
    if kind == "flipped byte":
        npy.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif kind == "truncated":
        npy.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        npy.write_bytes(b"")
    elif kind == "missing":
        npy.unlink()
    elif kind == "other dtype":
        np.save(npy, np.arange(1000, dtype=np.int64))
    elif kind == "description cut":
        marker.write_bytes(marker.read_bytes()[:20])
    elif kind == "description of something else":
        marker.write_text('{"built_from": "other", "crc": {}}')
    elif kind == "description not an object":
        marker.write_text("[]")


@pytest.mark.parametrize(
    "kind",
    [
        "flipped byte",
        "truncated",
        "empty",
        "missing",
        "other dtype",
        "description cut",
        "description of something else",
        "description not an object",
    ],
)
def test_damage_is_said_and_repaired(tmp_path: Path, kind: str) -> None:
    load(tmp_path)
    damage(tmp_path, kind)
    _, built, notes = load(tmp_path)
    assert built and len(notes) == 1 and "built again" in notes[0]
    assert load(tmp_path)[1:] == (False, [])


def test_no_damaged_header_is_a_surprise(tmp_path: Path) -> None:
    """numpy parses headers as Python: a lost bracket, an escape, a size beyond all memory."""
    load(tmp_path)
    npy = next(tmp_path.glob("*-a.npy"))
    whole = npy.read_bytes()
    end = whole.index(b"\n")
    texts = [whole[:at] + mark + whole[at + 1 :] for at in range(6, end) for mark in (b"\n", b"(", b"\xff", b"9")]
    texts += [whole.replace(b"(1000,)      ", size) for size in (b"(9999999999,)", b"(-1, -1000,) ", b"(10**99, 1,) ")]
    texts.append(whole.replace(b"(1000,)" + b" " * 22, b"(99999999999999999999999999,)"))
    for text in texts:
        npy.write_bytes(text)
        load(tmp_path)


def test_deleted_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that the user named is deleted during a start."""
    real, calls = cache_module.write_atomically, []

    def write(path: Path, chunks: object, *, sync: bool) -> None:
        calls.append(path)
        if len(calls) == 2:
            shutil.rmtree(path.parent)
        real(path, chunks, sync=sync)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_module, "write_atomically", write)
    cache = IndexCache(CachePlace(tmp_path / "c", required=True))
    assert cache.load_or_build(DESCRIPTION, arrays).keys() == arrays().keys()
    assert len(calls) == 6 and load(tmp_path / "c")[1:] == (False, [])


def test_no_pickle_is_ever_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "marker"),)

    load(tmp_path / "c")
    npy = next((tmp_path / "c").glob("*-a.npy"))
    for write in (
        lambda: np.save(npy, np.array([Evil()], dtype=object), allow_pickle=True),
        lambda: npy.write_bytes(pickle.dumps(Evil())),
    ):
        write()
        assert load(tmp_path / "c")[1]
        assert not (tmp_path / "marker").exists()


def test_interrupted_build_leaves_no_valid_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = cache_module.write_atomically, []

    class Killed(BaseException):
        pass

    for stop in range(4):
        calls.clear()

        def write(path: Path, chunks: object, *, sync: bool, stop: int = stop) -> None:
            if len(calls) == stop:
                raise Killed
            calls.append(path)
            real(path, chunks, sync=sync)  # type: ignore[arg-type]

        directory = tmp_path / str(stop)
        with monkeypatch.context() as patched:
            patched.setattr(cache_module, "write_atomically", write)
            with pytest.raises(Killed):
                load(directory)
        assert load(directory)[1:] == (True, [])


# Dies by SIGKILL at its N-th system call that changes the directory, or not at all.
BUILDER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from megatron.data.cache import CachePlace, IndexCache

left = int(sys.argv[2])

def watch(event, details):
    global left
    if event in ("open", "os.rename", "os.mkdir", "os.remove") and sys.argv[1] in str(details[0]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

arrays = lambda: {"a": np.arange(1000, dtype=np.int32), "b": np.arange(6).reshape(3, 2), "c": np.empty(0)}
sys.addaudithook(watch)
IndexCache(CachePlace(Path(sys.argv[1]))).load_or_build({"kind": "test", "seed": 1}, arrays)
print("operations", 10**6 - left)
"""


def test_killed_at_every_moment_leaves_a_valid_entry_or_none(tmp_path: Path) -> None:
    """SIGKILL before each opening, renaming and removal of a file; the next run builds, later ones find the entry."""
    run = [sys.executable, "-c", BUILDER]
    root = Path(__file__).resolve().parents[3]
    whole = subprocess.run([*run, str(tmp_path / "whole"), "1000000"], cwd=root, capture_output=True, text=True)
    operations = int(whole.stdout.split()[1])
    assert operations > 8
    for number in range(operations):
        directory = tmp_path / f"at-{number}"
        ended = subprocess.run([*run, str(directory), str(number)], cwd=root, capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        _, built, notes = load(directory)
        assert not notes  # no incomplete file has a final name, so there are no warnings
        assert built == (number < operations - 1)  # the entry becomes valid; last its claim goes
        assert load(directory)[1:] == (False, [])
    assert load(tmp_path / "whole")[1:] == (False, [])


def test_killed_while_large_arrays_are_written(tmp_path: Path) -> None:
    """SIGKILL during a write, at a random moment."""

    def build_large() -> Arrays:
        return {"a": np.arange(4_000_000, dtype=np.int32)}

    def build_in_child() -> None:
        IndexCache(CachePlace(tmp_path)).load_or_build(DESCRIPTION, build_large)

    moments = np.random.default_rng(0).uniform(0.0, 0.05, 12)
    for moment in moments:
        child = multiprocessing.get_context("fork").Process(target=build_in_child)
        child.start()
        time.sleep(float(moment))
        child.kill()
        child.join()
        cache = IndexCache(CachePlace(tmp_path))
        got = cache.load_or_build(DESCRIPTION, build_large)
        assert np.array_equal(got["a"], build_large()["a"]) and not cache.notes
        for path in tmp_path.iterdir():
            path.unlink()


def test_both_copies_are_never_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built arrays are freed before the stored ones are mapped."""
    monkeypatch.setattr(cache_module, "_MAPPED_FROM", 100)
    references = []

    def build() -> Arrays:
        built = arrays()
        references.extend(weakref.ref(array) for array in built.values())
        return built

    real, alive = IndexCache._load, []

    class Watched(IndexCache):
        def _load(self, directory: Path, key: str, text: str) -> Arrays | None:
            alive.append([reference() is not None for reference in references])
            return real(self, directory, key, text)

    Watched(CachePlace(tmp_path)).load_or_build(DESCRIPTION, build)
    assert alive == [[], [], [False] * 3]


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_entry_lost_between_writing_and_reading(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied between writing and reading: the arrays are rebuilt, but not stored again."""
    monkeypatch.setattr(cache_module, "_MAPPED_FROM", 100)

    class Unlucky(IndexCache):
        def _store(self, key: str, text: str, arrays: Arrays) -> None:
            super()._store(key, text, arrays)
            for path in tmp_path.iterdir():
                path.unlink() if how == "deleted" else path.write_bytes(b"")

    cache = Unlucky(CachePlace(tmp_path))
    got = cache.load_or_build(DESCRIPTION, arrays)
    assert all(np.array_equal(got[name], array) for name, array in arrays().items())
    assert len(cache.notes) == (how == "damaged")


def _build_in_process(directory: str, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for _ in range(5):
        load(Path(directory))
    results.put(True)  # type: ignore[attr-defined]


def test_processes_that_build_at_once_all_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.SimpleQueue()
    workers = [
        context.Process(target=_build_in_process, args=(str(tmp_path / "c"), barrier, results)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert load(tmp_path / "c")[1:] == (False, [])


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, built, notes = load(tmp_path / "file" / "c")
    assert built and "not stored" in notes[0]
    with pytest.raises(StorageError, match=r"--data-cache-path .*check the directory"):  # named by the user
        IndexCache(CachePlace(tmp_path / "file" / "c", required=True)).load_or_build(DESCRIPTION, arrays)


def data_of(directory: Path) -> str:
    for name in ("x.bin", "x.idx"):
        (directory / name).touch()
    return str(directory / "x")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def directory(asked: str | None, prefix: str) -> Path:
        return CachePlace.of(asked, prefix).directory

    assert directory(str(tmp_path / "asked"), "/data/x") == tmp_path / "asked"
    assert directory(None, data_of(tmp_path)) == tmp_path / "index-cache"
    monkeypatch.setattr(cache_module.os, "access", lambda path, mode: False)
    monkeypatch.setattr(cache_module.tempfile, "gettempdir", lambda: str(tmp_path))
    private = directory(None, str(tmp_path / "x"))
    assert private.parent == tmp_path and private.stat().st_mode & 0o77 == 0
    private.rmdir()
    private.symlink_to(tmp_path)  # another user's trap
    monkeypatch.setattr(cache_module.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "fresh"))
    assert directory(None, str(tmp_path / "x")) == tmp_path / "fresh"


class TestAnotherUser:
    """An index's writer controls which tokens a run sees. Users differ by number: the reader is another user here, and
    the files stay the test user's."""

    def stored(self, tmp_path: Path) -> CachePlace:
        place = CachePlace.of(None, data_of(tmp_path))
        assert IndexCache(place).load_or_build(DESCRIPTION, lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
        return place

    def read(self, place: CachePlace) -> tuple[list[int], list[str]]:
        """Builds values other than the stored ones, which shows which were used."""
        cache = IndexCache(place)
        return cache.load_or_build(DESCRIPTION, lambda: {"a": np.arange(3) + 10})["a"].tolist(), cache.notes

    def test_the_owner_of_the_data_is_trusted_and_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.stored(tmp_path)
        me = os.getuid() + 1
        monkeypatch.setattr(cache_module.os, "getuid", lambda: me)
        place = CachePlace.of(None, str(tmp_path / "x"))
        assert place.directory == tmp_path / f"index-cache-{me}"
        assert self.read(place) == ([0, 1, 2], []) and not place.directory.exists()

    def test_a_third_user_is_not(self, tmp_path: Path) -> None:
        """One user's data, another user's cache beside it, and a third user who reads it."""
        theirs = self.stored(tmp_path).directory
        place = CachePlace(tmp_path / "own", shared=theirs, trusted=frozenset({os.getuid() + 1}))
        found, notes = self.read(place)
        assert found == [10, 11, 12] and (tmp_path / "own").is_dir()
        assert notes == []
        own = CachePlace(theirs, trusted=frozenset({os.getuid() + 1}))  # where the third would write himself
        found, notes = self.read(own)
        assert found == [10, 11, 12] and len(notes) == 1
        assert f"owned by the untrusted user {os.getuid()}" in notes[0] and "--data-cache-path" in notes[0]

    @pytest.mark.parametrize("name", ["*description.json", "*-a.npy"])
    def test_a_file_that_everybody_may_write_is_not(self, tmp_path: Path, name: str) -> None:
        place = self.stored(tmp_path)
        next(place.directory.glob(name)).chmod(0o666)
        found, notes = self.read(place)
        assert found == [10, 11, 12] and "or world-writable" in notes[0]
        assert self.read(place) == ([10, 11, 12], []), "replaced by one that is trusted"

    def test_a_directory_that_the_user_names_is_trusted(self, tmp_path: Path) -> None:
        stored = self.stored(tmp_path)
        assert self.read(CachePlace.of(str(stored.directory), "")) == ([0, 1, 2], [])

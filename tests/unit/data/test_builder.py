"""The writer produces complete files or none, and exactly the given tokens."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import builder as builder_module
from megatron.data.indexed import growing
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.checksums import verify_blocks
from megatron.data.indexed.dataset import IndexedDataset
from megatron.errors import ConfigError, DataError, StorageError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_has_a_final_name_before_finalize(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    builder.add_document([1, 2, 3])
    assert names(tmp_path) == ["d.bin.partial"]
    summary = builder.finalize()
    assert names(tmp_path) == ["d.bin", "d.idx"]
    assert (summary.documents, summary.sequences, summary.tokens, summary.max_id) == (1, 1, 3, 3)


def test_summary(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        for document in ([5], [], np.array([6, 70000, 8])):
            builder.add_document(document)
        builder.add_document([1, 2], [1, 1])
        summary = builder.finalize()
    assert summary.dtype == "int32" and summary.prefix == str(tmp_path / "d")
    assert (summary.documents, summary.sequences, summary.tokens) == (4, 5, 6)
    assert summary.max_id == 70000


def test_merging_equals_writing_at_once(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    documents = [(random.integers(0, 100, sum(cut)), cut) for cut in random.integers(0, 6, (60, 2)).tolist()]
    with IndexedDatasetBuilder(tmp_path / "whole", "uint16") as whole:
        for tokens, cut in documents:
            whole.add_document(tokens, cut)
    for number, begin in enumerate((0, 20, 40)):
        with IndexedDatasetBuilder(tmp_path / f"part{number}", "uint16") as part:
            for tokens, cut in documents[begin : begin + 20]:
                part.add_document(tokens, cut)
    with IndexedDatasetBuilder(tmp_path / "merged", "uint16") as merged:
        for number in range(3):
            merged.add_dataset(tmp_path / f"part{number}")
        summary = merged.finalize()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert summary.max_id == max(int(tokens.max(initial=-1)) for tokens, _ in documents)


def test_merging_another_dtype_is_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", "int32") as a:
        a.add_document([1])
    with (
        pytest.raises(DataError, match=r"token dtype int32, but .* uint16"),
        IndexedDatasetBuilder(tmp_path / "b", "uint16") as b,
    ):
        b.add_dataset(tmp_path / "a")
    assert names(tmp_path) == ["a.bin", "a.idx"]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([65536], None, "token id 65536 does not fit uint16"),
        ([-1], None, "token id -1 does not fit"),
        ([1.5], None, "must be a list of integers"),
        ([[1, 2]], None, "must be a list of integers"),
        ([1, 2], [1], "lengths add up to 1, but there are 2 tokens"),
        ([1, 2], [3, -1], "sequence has -1 tokens"),
    ],
)
def test_bad_documents_are_refused_and_leave_nothing(
    tmp_path: Path, tokens: list[int], lengths: list[int] | None, message: str
) -> None:
    with pytest.raises(DataError, match=message), IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        builder.add_document(tokens, lengths)
    assert names(tmp_path) == []


def test_float_token_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token dtype float32"):
        IndexedDatasetBuilder(tmp_path / "d", "float32")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_existing_output_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"d{suffix}").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--overwrite"):
        IndexedDatasetBuilder(tmp_path / "d", "uint16")
    assert names(tmp_path) == [f"d{suffix}"]


def test_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    (tmp_path / "d.bin").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--overwrite"):
        builder.finalize()
    assert names(tmp_path) == ["d.bin"] and (tmp_path / "d.bin").read_bytes() == b"precious"


def test_overwrite_removes_the_old_record(tmp_path: Path) -> None:
    for text in ([1, 2], [3]):
        with IndexedDatasetBuilder(tmp_path / "d", "uint16", overwrite=True) as builder:
            builder.add_document(text)
        assert IndexedDataset(tmp_path / "d")[0].tolist() == text
        assert not (tmp_path / "d.meta.json").exists()
        (tmp_path / "d.meta.json").write_text("of these tokens only")


def test_two_writers_of_one_output(tmp_path: Path) -> None:
    first = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    first.add_document([1])
    with pytest.raises(ConfigError, match="another process is writing it"):
        IndexedDatasetBuilder(tmp_path / "d", "uint16")
    first.finalize()
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1]


def test_leftover_of_a_killed_run_is_reused(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from megatron.data.indexed.builder import IndexedDatasetBuilder\n"
        "b = IndexedDatasetBuilder(sys.argv[1], 'uint16'); b.add_document([7] * 100000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "d")], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == ["d.bin.partial"]
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        builder.add_document([1])
    assert names(tmp_path) == ["d.bin", "d.idx"] and IndexedDataset(tmp_path / "d")[0].tolist() == [1]


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        IndexedDatasetBuilder(tmp_path / "nowhere" / "d", "uint16")


@pytest.mark.parametrize("moment", ["write", "fsync", "index", "rename bin", "rename idx"])
def test_failing_disk_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: object, **__: object) -> None:
        raise full

    real_replace = Path.replace

    def fail_for(suffix: str):
        def replace(self: Path, target: str) -> Path:
            return fail() if str(target).endswith(suffix) else real_replace(self, target)  # type: ignore[func-returns-value, return-value]

        return replace

    if moment == "write":
        stream = builder._stream
        monkeypatch.setattr(builder, "_stream", type("Full", (), {"write": fail, "close": stream.close})())
    elif moment == "fsync":
        monkeypatch.setattr(builder_module.os, "fsync", fail)
    elif moment == "index":
        monkeypatch.setattr(growing, "write_synced", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail_for(f".{moment.split()[1]}"))
    with pytest.raises(StorageError, match=r"d\.bin.*No space left on device.*free some space"):
        builder.add_document([1, 2, 3])
        builder.finalize()
    assert not (tmp_path / "d.idx").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_file_that_may_not_grow(tmp_path: Path) -> None:
    """A write really fails, which shows when the buffer is flushed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    builder = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    builder.add_document([1] * 1000)  # less than the buffer holds
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match=r"d\.bin.*File too large"):
            builder.finalize()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_run_killed_between_its_two_renames_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    real_replace = Path.replace

    def killed(self: Path, target: str) -> Path:
        if str(target).endswith(".idx"):
            raise Killed
        return real_replace(self, target)

    builder = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    builder.add_document([1])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            builder.finalize()
    assert names(tmp_path) == ["d.bin", "d.idx.partial"]
    with pytest.raises(ConfigError, match="exists"):  # the lock lasts as long as that process
        IndexedDatasetBuilder(tmp_path / "d", "uint16")
    assert builder._stream is not None
    builder._stream.close()
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as again:
        again.add_document([2])
    assert names(tmp_path) == ["d.bin", "d.idx"] and IndexedDataset(tmp_path / "d")[0].tolist() == [2]


@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached"])
def test_each_kind_of_index_holds_the_same(tmp_path: Path, impl: str) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16", impl=impl) as builder:
        builder.add_document([1, 2])
        builder.add_document([3])
        builder.add_document([4, 5, 6], [1, 2])
        builder.add_document([], [])
        summary = builder.finalize()
    data = IndexedDataset(tmp_path / "d")
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2], [3], [4], [5, 6]]
    assert data.document_indices.tolist() == [0, 1, 2, 4, 4]
    assert summary.checksums is not None
    verify_blocks(tmp_path / "d.bin", summary.checksums)
    assert names(tmp_path) == ["d.bin", "d.idx"]


def test_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    lengths = [1] * 1000
    tokens = np.ones(1000, dtype=np.uint16)

    def peak(blocks: int) -> int:
        builder = IndexedDatasetBuilder(tmp_path / f"d{blocks}", "uint16")
        tracemalloc.start()
        for _ in range(blocks):
            builder.add_document(tokens, lengths)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        builder.abort()
        return used

    peak(1)
    assert peak(1000) < 1.1 * peak(10) + 4096

"""The whole job in one process, with segments of a few lines: order, places, partitions, counts, memory."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.checksums import verify_blocks
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.record import read_record
from megatron.errors import ConfigError, DataError, PeerLostError
from megatron.preprocess.encoder import SegmentEncoder
from megatron.preprocess.input.files import expand_inputs
from megatron.preprocess.input.segments import Segment, plan_segments
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.run import preprocess
from megatron.preprocess.worker_output import SegmentResult
from megatron.tokenizer import EncoderDifference, TokenizerSettings
from megatron.tokenizer.fast import engine as fast_engine
from megatron.tokenizer.null import NullTokenizer
from megatron.utils import pool
from tests.helpers.fresh import in_fresh_process
from tests.unit.preprocess.support import ROOT, expected_files
from tests.unit.tokenizer.support import write_small_bpe

NULL = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000)


def quiet(line: str) -> None:
    pass


def settings(folder: Path, prefix: str = "out", *, inputs: Sequence[str] = ("in.jsonl",), **changes: Any) -> Any:
    given: dict[str, Any] = {
        "inputs": tuple(str(folder / name) for name in inputs),
        "output_prefix": str(folder / prefix),
        "tokenizer": NULL,
        "segment_bytes": 300,
    }
    return PreprocessSettings(**{**given, **changes})


def lines(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Documents of one sequence, of several with empty ones between, and of none."""
    kinds: list[Any] = ["1 2 3", ["4", "", "5 6"], "", [], ["", ""], "7"]
    return [{"text": kinds[i % len(kinds)], "meta": {"text": f"{i % 900}"}} for i in range(start, start + count)]


def write(path: Path, rows: Sequence[Any]) -> None:
    content = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def files(folder: Path, prefix: str = "out", key: str = "text", level: str = "document") -> tuple[bytes, bytes]:
    stem = f"{prefix}_{key}_{level}"
    return (folder / f"{stem}.bin").read_bytes(), (folder / f"{stem}.idx").read_bytes()


def wanted(rows: Sequence[dict[str, Any]], eod: int | None = None) -> tuple[bytes, bytes]:
    documents = []
    for row in rows:
        texts = row["text"] if isinstance(row["text"], list) else [row["text"]]
        sequences = [[int(word) for word in text.split()] for text in texts if text]
        if sequences and eod is not None:
            sequences[-1].append(eod)
        documents.append(sequences)
    return expected_files(documents)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("append_eod", [False, True])
def test_any_number_of_workers_writes_the_same(tmp_path: Path, workers: int, append_eod: bool) -> None:
    write(tmp_path / "a.jsonl", lines(50))
    write(tmp_path / "b.jsonl.gz", lines(40, 50))
    write(tmp_path / "c.jsonl", lines(3, 90))
    inputs = ("a.jsonl", "b.jsonl.gz", "c.jsonl")
    given = settings(
        tmp_path, inputs=inputs, workers=workers, append_eod=append_eod, json_keys=("text", "meta.text"), chunk_size=3
    )
    report = preprocess(given, quiet)
    assert files(tmp_path) == wanted(lines(93), 1000 if append_eod else None)
    data = IndexedDataset(tmp_path / "out_meta.text_document")
    assert [int(data[i][0]) for i in range(len(data))] == list(range(93))
    prefix, text = report.keys[0].prefix, report.keys[0].totals
    assert (text.documents, text.sequences, text.empty) == (93, len(IndexedDataset(prefix)), 46)
    assert text.longest == 3 + append_eod and text.max_id == (1000 if append_eod else 7)
    for key in report.keys:
        record = read_record(key.prefix)
        assert record is not None and record.source == inputs
        assert record.bin is not None
        verify_blocks(Path(f"{key.prefix}.bin"), record.bin)


def test_a_line_longer_than_many_segments(tmp_path: Path) -> None:
    rows = [*lines(5), {"text": "8 " * 2000}, *lines(5)]
    write(tmp_path / "in.jsonl", rows)
    preprocess(settings(tmp_path, workers=3), quiet)
    assert files(tmp_path) == wanted(rows)


@pytest.mark.parametrize("kind", ["lazy", "cached"])
def test_the_older_index(tmp_path: Path, kind: Any) -> None:
    write(tmp_path / "in.jsonl", lines(30))
    preprocess(settings(tmp_path, "mmap"), quiet)
    preprocess(settings(tmp_path, dataset_impl=kind), quiet)
    new, old = IndexedDataset(tmp_path / "mmap_text_document"), IndexedDataset(tmp_path / "out_text_document")
    assert files(tmp_path)[1].startswith(b"TNTIDX") and files(tmp_path)[0] == files(tmp_path, "mmap")[0]
    assert np.array_equal(new.sequence_lengths, old.sequence_lengths)
    assert np.array_equal(new.document_indices, old.document_indices)


# ---------------------------------------------------------------- places


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("bad", [0, 1, 30, 79, 80])
def test_a_bad_line_is_named_by_its_file_and_number(tmp_path: Path, suffix: str, bad: int) -> None:
    rows: list[Any] = [*lines(80)]
    rows.insert(bad, b"{")
    write(tmp_path / "a.jsonl", lines(10))
    write(tmp_path / f"in.jsonl{suffix}", rows)
    given = settings(tmp_path, inputs=("a.jsonl", f"in.jsonl{suffix}"), workers=2)
    with pytest.raises(DataError, match=rf"in\.jsonl{suffix}:{bad + 1}: not JSON"):
        preprocess(given, quiet)


def test_skipped_lines_are_counted_by_kind_and_the_first_are_shown(tmp_path: Path) -> None:
    rows: list[Any] = [*lines(60)]
    for place in range(0, 60, 4):
        rows.insert(place, b"{" if place % 8 else b'{"other": 1}')
    rows.insert(7, b"")
    write(tmp_path / "in.jsonl", rows)
    said: list[str] = []
    report = preprocess(settings(tmp_path, workers=2, on_error="skip"), said.append)
    assert (report.documents, report.blank_lines) == (60, 1)
    assert dict(report.bad_lines) == {"not JSON": 7, "key missing": 8}
    assert files(tmp_path) == wanted(lines(60))
    places = [i + 1 for i, row in enumerate(rows) if isinstance(row, bytes) and row]
    shown = [line for line in said if "in.jsonl:" in line]
    assert [int(line.split("in.jsonl:")[1].split(":")[0]) for line in shown] == places[: len(shown)]
    assert len(shown) >= 10 and said[-1] == "further skipped lines are only counted"


def test_of_a_partition_the_lines_are_those_of_the_whole_file(tmp_path: Path) -> None:
    rows: list[Any] = [*lines(80)]
    rows.insert(70, b"{")
    write(tmp_path / "in.jsonl", rows)
    with pytest.raises(DataError, match=r"in\.jsonl:71: not JSON"):
        preprocess(settings(tmp_path, rank=1, world=2), quiet)


def test_a_difference_of_the_fast_encoder_stops_the_run_and_names_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = NullTokenizer.encode_batch

    def differ(self: NullTokenizer, texts: Sequence[str]) -> Any:
        if "666" in texts:
            raise EncoderDifference(list(texts).index("666"), "666")
        return encode(self, texts)

    monkeypatch.setattr(NullTokenizer, "encode_batch", differ)
    rows = lines(80)
    rows[41] = {"text": ["1", "", "666"]}
    write(tmp_path / "in.jsonl", rows)
    for on_error in ("stop", "skip"):
        with pytest.raises(DataError, match=r"in\.jsonl:42: the fast encoder's ids differ.*--encoder exact"):
            preprocess(settings(tmp_path, workers=2, on_error=on_error, overwrite=True), quiet)


@pytest.mark.parametrize("how", ["memory", "killed"])
@pytest.mark.parametrize("place", [3, 41])
def test_a_worker_that_fails_is_named_with_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, place: int
) -> None:
    encode = NullTokenizer.encode_batch

    def fail(self: NullTokenizer, texts: Sequence[str]) -> Any:
        if "666" in texts:
            if how == "memory":
                raise MemoryError
            import os

            os.kill(os.getpid(), 9)
        return encode(self, texts)

    monkeypatch.setattr(NullTokenizer, "encode_batch", fail)
    rows = lines(80)
    rows[place] = {"text": "666"}
    write(tmp_path / "a.jsonl", lines(7))
    write(tmp_path / "in.jsonl", rows)
    with pytest.raises(PeerLostError) as refusal:
        preprocess(settings(tmp_path, inputs=("a.jsonl", "in.jsonl"), workers=3, chunk_size=1), quiet)
    message = str(refusal.value)
    assert ("ended with code 137" if how == "memory" else "killed by signal 9") in message
    first, _, last = message.partition("in.jsonl, lines ")[2].partition(":")[0].partition(" to ")
    assert int(first) == place + 1 <= int(last) <= place + 12, message


# ---------------------------------------------------------------- partitions


@pytest.mark.parametrize("world", [1, 2, 3, 40])
def test_the_partitions_end_to_end_are_the_whole(tmp_path: Path, world: int) -> None:
    write(tmp_path / "a.jsonl", lines(60))
    write(tmp_path / "b.jsonl.gz", lines(20, 60))
    given: dict[str, Any] = {"inputs": ("a.jsonl", "b.jsonl.gz"), "append_eod": True}
    preprocess(settings(tmp_path, "whole", **given), quiet)
    for rank in range(world):
        preprocess(settings(tmp_path, rank=rank, world=world, **given), quiet)
    parts = sorted(path.name.removesuffix(".idx") for path in tmp_path.glob("out*_text_document.idx"))
    assert len(parts) == world
    if world > 1:
        assert parts[1] == f"out_part001_of_{world:03d}_text_document"
    with IndexedDatasetBuilder(tmp_path / "merged_text_document", "uint16") as merged:
        for part in parts:
            merged.add_dataset(tmp_path / part)
    assert files(tmp_path, "merged") == files(tmp_path, "whole")


def test_a_pipe_cannot_be_shared(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match="2 partitions cannot share a pipe"):
        preprocess(settings(tmp_path, inputs=("pipe.jsonl",), rank=0, world=2), quiet)


# ---------------------------------------------------------------- sentences


def test_sentences_are_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nltk")
    write(tmp_path / "in.jsonl", [{"text": "1 2. 3 4.\n\n5."}, {"text": ""}, {"text": "6"}] * 20)

    def as_bytes(self: NullTokenizer, texts: Sequence[str]) -> Any:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    monkeypatch.setattr(NullTokenizer, "encode_batch", as_bytes)
    preprocess(settings(tmp_path, split_sentences=True, workers=2), quiet)
    data = IndexedDataset(tmp_path / "out_text_sentence")
    assert data.num_documents == 60
    first = bytes(data[0].astype("u1").tolist()).decode()
    assert first.startswith("1 2.") and "6" not in first


# ---------------------------------------------------------------- memory

MEASURE = """
import sys
from pathlib import Path
from megatron.preprocess.encoder import SegmentEncoder
from megatron.preprocess.input.segments import plan_segments
from megatron.preprocess.input.files import expand_inputs
from megatron.preprocess.options import PreprocessSettings
from megatron.tokenizer import TokenizerSettings
settings = PreprocessSettings(inputs=(), output_prefix="", append_eod=True,
                              tokenizer=TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=10))
encoder = SegmentEncoder(settings, Path(sys.argv[2]))
for segment in plan_segments(expand_inputs([sys.argv[1]]), segment_bytes=4 << 20):
    result = encoder(segment, lambda note: None)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def peak_kilobytes(folder: Path, documents: int) -> int:
    path = folder / f"{documents}.jsonl"
    path.write_bytes(b'{"text": "1 2 3"}\n' * documents)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_the_memory_of_a_worker_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    few, many = peak_kilobytes(tmp_path, 10_000), peak_kilobytes(tmp_path, 300_000)
    assert many < 1.1 * few, (few, many)


class Watched:
    """A worker's handler that answers with its peak memory."""

    def __init__(self, encoder: SegmentEncoder) -> None:
        self._encoder = encoder

    def __call__(self, segment: Segment, advance: Callable[[Any], None]) -> int:
        result = self._encoder(segment, advance)
        assert isinstance(result, SegmentResult) and result.documents
        peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        assert peak is not None
        return int(peak[1]) << 10


def peaks_of_a_worker(folder: Path, cache_bytes: int) -> list[int]:
    """The worker's peak memory after each segment of words.jsonl."""
    fast_engine.CACHE_BYTES = cache_bytes
    files = TokenizerSettings(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))
    given = PreprocessSettings(inputs=(), output_prefix="", tokenizer=files, append_eod=True)
    encoder = SegmentEncoder(given, folder)
    segments = plan_segments(expand_inputs([str(folder / "words.jsonl")]), segment_bytes=1 << 19)
    with pool.WorkerPool[Segment, int](Watched(encoder), 1) as workers:
        return list(workers.map(segments, described=lambda segment: segment.number, noted=lambda note: None))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc tells the memory of a process")
@pytest.mark.parametrize("bounded", [True, False])
def test_new_words_without_end_do_not_fill_a_worker(tmp_path: Path, bounded: bool) -> None:
    """The fast encoder caches every word; this input has only new words."""
    pytest.importorskip("gigatoken")
    write_small_bpe(tmp_path)
    chance = random.Random(1)
    with open(tmp_path / "words.jsonl", "w") as stream:
        for _ in range(60_000):
            words = ("".join(chance.choices("abcdefghijklmnop", k=10)) for _ in range(30))
            stream.write(json.dumps({"text": " ".join(words)}) + "\n")
    # The planted fault is a bound that is never met.
    peaks = in_fresh_process(peaks_of_a_worker, tmp_path, fast_engine.CACHE_BYTES if bounded else 1 << 40)
    grown = max(peaks) - peaks[0]
    assert len(peaks) > 10
    assert grown < 48 << 20 if bounded else grown > 96 << 20

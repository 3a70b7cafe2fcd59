"""Every line of every input is in exactly one segment, however it is cut, compressed and distributed."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import random
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from megatron.preprocess.input import segments, streams
from megatron.preprocess.input.files import InputFile, expand_inputs
from megatron.preprocess.input.segments import (
    Segment,
    count_lines,
    plan_segments,
    read_batches,
    share_bytes,
)


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="pip install zstandard")
    return bytes(zstandard.compress(content))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def source_of(path: Path) -> InputFile:
    [source] = expand_inputs([str(path)])
    return source


def texts_of(planned: Iterator[Segment], keys: tuple[str, ...] = ("text",)) -> list[Any]:
    """Texts in order; checks the batches' own numbers."""
    texts: list[Any] = []
    for segment in planned:
        line = 0
        for batch in read_batches(segment, keys):
            assert batch.first_line == line
            assert batch.lines == len(batch.documents) + batch.blank + len(batch.bad)
            line += batch.lines
            texts += [found[0][0] if keys == ("text",) else found for _, found in batch.documents]
    return texts


def bad_of(planned: Iterator[Segment]) -> list[tuple[int, str]]:
    """Bad lines by their number in the file, from 1."""
    bad: list[tuple[int, str]] = []
    before = 0
    for segment in planned:
        for batch in read_batches(segment, ["text"]):
            bad += [(before + one.number + 1, one.kind) for one in batch.bad]
        before += sum(batch.lines for batch in read_batches(segment, ["text"]))
    return bad


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


# ---------------------------------------------------------------- plain lines

lines = st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=30)


def read_raw(planned: Iterator[Segment], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Raw lines, through a parser that returns them unchanged."""
    found: list[bytes] = []

    def keep(block: bytes, keys: object, first: int = 0) -> segments.Batch:
        taken = block.split(b"\n")
        taken = taken if taken[-1] else taken[:-1]
        found.extend(taken)
        return segments.Batch(first, len(taken), len(block), [], 0, [])

    monkeypatch.setattr(segments, "parse_lines", keep)
    for segment in planned:
        for _ in read_batches(segment, ["text"]):
            pass
    return found


def check_cut(content: bytes, segment_bytes: int, batch_bytes: int, path: Path, packed: bool = False) -> None:
    write(path, gzip.compress(content) if packed else content)
    status = path.stat()
    source = InputFile(
        str(path), "gzip" if packed else "lines", status.st_size, f"a {status.st_size} {status.st_mtime_ns}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "BATCH_BYTES", batch_bytes)
        found = read_raw(plan_segments([source], segment_bytes=segment_bytes), patch)
    expected = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert found == (expected if expected[-1] else expected[:-1])


@settings(max_examples=300, deadline=None)
@given(lines, st.booleans(), st.integers(1, 40), st.integers(1, 40), st.booleans())
@example([b"\xef\xbb\xbf"], False, 1, 1, False)
def test_every_line_once(drawn: list[bytes], ended: bool, segment_bytes: int, batch_bytes: int, packed: bool) -> None:
    content = b"\n".join(drawn) + (b"\n" if ended else b"")
    # One file for all examples: hypothesis and function-scoped folders do not go together.
    path = Path(tempfile.gettempdir()) / f"every_line_once_{os.getpid()}"
    try:
        check_cut(content, segment_bytes, batch_bytes, path, packed)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("planted", ["skips the line at the start", "reads past the end"])
def test_a_wrong_cut_would_be_seen(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = segments._seek_line

    def wrong(file: Any, segment: Segment) -> bool:
        if planted == "reads past the end":
            object.__setattr__(segment, "stop", segment.stop + 1)
            return right(file, segment)
        file.seek(segment.start)  # not one byte earlier: loses a line that begins exactly there
        return file.readline() != b"" and file.tell() < segment.stop

    monkeypatch.setattr(segments, "_seek_line", wrong)
    with pytest.raises((AssertionError, DataError)):
        for size in range(1, 12):
            check_cut(b"ab\ncd\nef\n\ngh\n", size, 100, tmp_path / "lines")


def test_segments_of_a_plain_file_are_ranges_that_nobody_has_read(tmp_path: Path) -> None:
    files = [source_of(write(tmp_path / name, b"{}\n" * n)) for name, n in (("a", 5), ("empty", 0), ("b", 2))]
    planned = list(plan_segments(files, segment_bytes=6))
    assert [(s.source.path[-1], s.number, s.start, s.stop, s.position) for s in planned] == [
        ("a", 0, 0, 6, 6),
        ("a", 1, 6, 12, 12),
        ("a", 2, 12, 15, 15),
        ("b", 3, 0, 6, 21),
    ]


def test_lines_may_end_and_begin_in_every_way(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "1"}\r\n\r\n \n{"text": "2"}\n\0\n\xef\xbb\xbf{"text": "3"}\n{"text": "4"}'
    for name, packed in (("a", content), ("b.gz", gzip.compress(content)), ("c.zst", zstd(content))):
        source = source_of(write(tmp_path / name, packed))
        for size in (1, 7, 1000):
            assert texts_of(plan_segments([source], segment_bytes=size)) == ["1", "2", "4"]
            assert bad_of(plan_segments([source], segment_bytes=size)) == [(5, "not JSON"), (6, "not JSON")]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("segment_bytes", [10, 3000, 10**6])
def test_a_line_over_the_limit_is_a_bad_line(
    pack: Any, segment_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = b'{"text": "' + b"x" * 5000 + b'"}'
    content = b'{"text": "1"}\n' + long + b'\n{"text": "2"}\n' + long
    source = source_of(write(tmp_path / "a.jsonl", pack(content)))
    for limit, kinds in ((100, ["line too long"] * 2), (len(long) - 1, ["line too long"] * 2), (len(long), [])):
        monkeypatch.setattr(streams, "MAX_LINE_BYTES", limit)
        planned = list(plan_segments([source], segment_bytes=segment_bytes))
        bad = [one.kind for s in planned for b in read_batches(s, ["text"]) for one in b.bad]
        assert bad == kinds
        assert sum(b.lines for s in planned for b in read_batches(s, ["text"])) == 4


@pytest.mark.parametrize("name", ["a.jsonl", "a.gz", "a.zst", "b.json", "b.json.gz"])
def test_a_long_line_and_a_bomb_cost_no_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of megabytes without a line end, with a limit of one."""
    monkeypatch.setattr(streams, "_ZSTD_READ_BYTES", 64)  # zstd has its own minimum
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 1 << 20)
    size = 150 << 20
    inside = (b"[" if name.startswith("b") else b"") + b'{"text": "'
    path = tmp_path / name
    opener: Any = gzip.open if name.endswith(".gz") else open
    if name.endswith(".zst"):
        path.write_bytes(zstd(inside + bytes(size)))
    else:
        with opener(path, "wb", *([1] if opener is gzip.open else [])) as file:
            file.write(inside)
            for _ in range(size >> 20):
                file.write(b"x" * (1 << 20))
            file.write(b'"}' + (b"]" if name.startswith("b") else b""))
    tracemalloc.start()
    try:
        kinds = []
        for segment in plan_segments([source_of(path)], segment_bytes=1 << 20):
            kinds += [bad.kind for batch in read_batches(segment, ["text"]) for bad in batch.bad]
        assert kinds == ["line too long"]
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_a_line_longer_than_many_segments_is_skipped_segment_by_segment(tmp_path: Path) -> None:
    source = source_of(write(tmp_path / "a", lines_of(["1", "x" * 100000, "2"])))
    planned = list(plan_segments([source], segment_bytes=1000))
    counts = [sum(batch.lines for batch in read_batches(segment, ["text"])) for segment in planned]
    assert counts[0] == 2 and sum(counts) == 3 and counts[-1] == 1


def test_a_file_that_shrinks_or_goes_away_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"{}\n" * 10)
    planned = list(plan_segments([source_of(path)], segment_bytes=9))
    os.truncate(path, 7)
    for segment in planned[1:]:
        with pytest.raises(DataError, match=r"a: changed while it was read \(30 bytes before, 7 now\); run again"):
            list(read_batches(segment, ["text"]))
    path.unlink()
    with pytest.raises(DataError, match="removed while it was read"):
        list(read_batches(planned[0], ["text"]))


def test_lines_before_a_share_are_counted(tmp_path: Path) -> None:
    chance = random.Random(3)
    content = b"".join(b"x" * chance.randrange(5) + b"\n" for _ in range(200)) + b"end"
    source = source_of(write(tmp_path / "a", content))
    for size in (1, 2, 3, 7, 50):
        before = 0
        for segment in plan_segments([source], segment_bytes=size):
            assert count_lines(source, 0, segment.start) == before
            before += sum(batch.lines for batch in read_batches(segment, ["text"]))
        assert before == 201


# ---------------------------------------------------------------- streams


def test_the_cut_of_a_stream_depends_on_its_content_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    content = lines_of(["x" * chance.randrange(200) for _ in range(500)])
    halves = content[: len(content) // 3], content[len(content) // 3 :]
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    variants = {
        "one.gz": gzip.compress(content),
        "members.gz": gzip.compress(halves[0]) + gzip.compress(b"") + gzip.compress(halves[1], 1) + bytes(100),
        "one.zst": zstd(content),
        "frames.zst": zstd(halves[0]) + skippable + zstd(b"") + zstd(halves[1]),
    }
    cuts = set()
    for name, packed in variants.items():
        source = source_of(write(tmp_path / name, packed))
        for read_bytes in (7, 1 << 18):
            monkeypatch.setattr(streams, "_READ_BYTES", read_bytes)
            planned = list(plan_segments([source], segment_bytes=1000))
            cuts.add(tuple(segment.data for segment in planned))
            assert texts_of(iter(planned)) == [json.loads(line)["text"] for line in content.splitlines()]
            assert planned[-1].position == source.size
    assert len(cuts) == 1


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_every_truncation_of_a_packed_file_is_noticed(ending: str, tmp_path: Path) -> None:
    pack = gzip.compress if ending == ".gz" else zstd
    content = lines_of([str(i) for i in range(100)])
    packed = pack(content[:500]) + pack(content[500:])
    first = len(pack(content[:500]))
    for cut in {*range(1, first), *range(first + 1, len(packed), 7)}:
        source = source_of(write(tmp_path / f"a{ending}", packed[:cut]))
        with pytest.raises(DataError, match=r"damaged (gzip|zstd) file after line \d+ \(it ends too early\)"):
            list(plan_segments([source]))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_damage_is_named_with_its_line(ending: str, tmp_path: Path) -> None:
    pack = gzip.compress if ending == ".gz" else zstd
    content = lines_of([str(i) for i in range(10)])
    source = source_of(write(tmp_path / f"a{ending}", pack(content) + b"\x1f\x8b garbage of some length"))
    with pytest.raises(DataError, match=rf"a{ending}: damaged .* file after line 10 \(.*\); fetch it again"):
        list(plan_segments([source]))
    flipped = bytearray(pack(random.Random(2).randbytes(5000)))
    flipped[-6] ^= 1  # in the checksum or the last block
    if ending == ".gz":
        with pytest.raises(DataError, match="damaged gzip file"):
            list(plan_segments([source_of(write(tmp_path / "b.gz", bytes(flipped)))]))


def test_a_window_too_large_is_said(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="pip install zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=29)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"{}\n" * 10**6)
    with pytest.raises(DataError, match="window is over 128 MiB, compress it without --long"):
        list(plan_segments([source_of(write(tmp_path / "a.zst", packed))]))


def test_an_empty_packed_file_has_no_segments(tmp_path: Path) -> None:
    for name, content in (("b.gz", gzip.compress(b"")), ("d.zst", zstd(b""))):
        assert list(plan_segments([source_of(write(tmp_path / name, content))])) == []


@pytest.mark.parametrize(
    "content", [lines_of(["1", "2"]), b' \n[{"text": "1"}, {"text": "2"}]'], ids=["lines", "array"]
)
def test_standard_input_and_pipes(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + content)))
    sources = expand_inputs(["-"])
    planned = list(plan_segments(sources))
    assert texts_of(iter(planned)) == ["1", "2"]
    assert planned[0].source.place(2) == ("standard input, item 2" if b"[" in content else "standard input:2")
    assert not sys.stdin.closed
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    file = write(tmp_path / "a.jsonl", b'{"text": "3"}')
    sources_behind = expand_inputs([str(pipe), str(file)])
    planned = list(plan_segments(sources_behind))
    writer.join()
    assert texts_of(iter(planned)) == ["1", "2", "3"]
    assert [segment.position for segment in planned] == [len(content), len(content) + 13]
    assert share_bytes(sources_behind, share=(0, 1)) == 0
    with pytest.raises(ConfigError, match=r"standard input: 2 partitions cannot share a pipe"):
        list(plan_segments(sources, share=(0, 2)))


# ---------------------------------------------------------------- shares


def random_files(chance: random.Random, folder: Path) -> list[InputFile]:
    made = []
    for i in range(chance.randrange(1, 7)):
        content = lines_of([f"{i}.{j}." + "x" * chance.randrange(60) for j in range(chance.choice([0, 1, 5, 40]))])
        ending, pack = chance.choice([(".jsonl", bytes), (".gz", gzip.compress), (".zst", zstd), (".parquet", None)])
        path = folder / f"{i}{ending}"
        if pack is None:
            pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow")
            column = pyarrow.array([json.loads(line)["text"] for line in content.splitlines()], pyarrow.string())
            parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=chance.choice([3, 100]))
        else:
            write(path, pack(content))
        made.append(source_of(path))
    return made


@pytest.mark.parametrize("seed", range(40))
def test_shares_laid_end_to_end_are_the_whole(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    files = random_files(chance, tmp_path)
    size = chance.choice([50, 500, 5000])
    whole = list(plan_segments(files, segment_bytes=size))
    for world in (1, 2, 3, chance.randrange(4, 30), 100):
        shares = [list(plan_segments(files, segment_bytes=size, share=(rank, world))) for rank in range(world)]
        together = [segment for share in shares for segment in share]
        assert [without_place(segment) for segment in together] == [without_place(segment) for segment in whole]
        sizes = [share_bytes(files, segment_bytes=size, share=(rank, world)) for rank in range(world)]
        assert sum(sizes) == sum(source.size for source in files if source.size and holds_segments(source, whole, size))
        for share, bytes_on_disk in zip(shares, sizes, strict=True):
            assert [segment.number for segment in share] == list(range(len(share)))
            positions = [segment.position for segment in share]
            assert positions == sorted(positions) and max(positions, default=0) <= bytes_on_disk
    assert texts_of(iter(whole)) == [text for source in files for text in texts_of(plan_segments([source]))]


def holds_segments(source: InputFile, whole: list[Segment], size: int) -> bool:
    return source.kind != "parquet" or any(segment.source == source for segment in whole)


def without_place(segment: Segment) -> Segment:
    return dataclasses.replace(segment, number=0, position=0)


def test_shares_are_of_like_size(tmp_path: Path) -> None:
    files = [source_of(write(tmp_path / f"{i}", b"{}\n" * (1000 * (i % 7 + 1)))) for i in range(20)]
    total = sum(source.size for source in files)
    for world in (2, 5, 16):
        sizes = [share_bytes(files, segment_bytes=100, share=(rank, world)) for rank in range(world)]
        assert sum(sizes) == total and max(sizes) - min(sizes) <= 2 * 100

"""Cuts input files into segments, and reads a segment as batches of documents.

The cut depends only on the content, not on the number of workers or the partition.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from megatron.errors import ConfigError, DataError
from megatron.preprocess.input.content import UTF8_BOM
from megatron.preprocess.input.documents import Batch, parse_lines
from megatron.preprocess.input.files import InputFile
from megatron.preprocess.input.streams import SourceStream, take_lines
from megatron.preprocess.input.tables import count_rows, read_rows, row_group_runs

SEGMENT_BYTES = 32 << 20
BATCH_BYTES = 1 << 20
BATCH_LINES = 4096  # approximate; a megabyte of tiny documents would be many Python objects
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Segment:
    source: InputFile
    number: int  # counted from 0 over the whole share
    start: int  # lines: a byte range, with the lines that begin in it; parquet: row groups; streams: 0 to len(data)
    stop: int
    data: bytes | None  # streams: whole lines
    position: int  # bytes on disk of the share that are consumed once it is done


@dataclass(frozen=True, slots=True)
class _Unit:
    """Unit of distribution over ranks: one segment, or a whole stream."""

    source: InputFile
    start: int
    stop: int
    size: int  # bytes on disk


def plan_segments(
    sources: Sequence[InputFile], *, segment_bytes: int = SEGMENT_BYTES, share: tuple[int, int] = (0, 1)
) -> Iterator[Segment]:
    """Yields the contiguous segments of share (rank, world). The shares of all ranks add up to the input."""
    number = position = 0
    for unit in _units_of_share(sources, segment_bytes, share):
        if unit.source.kind in ("lines", "parquet"):
            position += unit.size
            yield Segment(unit.source, number, unit.start, unit.stop, None, position)
            number += 1
        else:
            stream = SourceStream(unit.source)
            for data in stream.pieces(segment_bytes):
                yield Segment(stream.source, number, 0, len(data), data, position + stream.consumed)
                number += 1
            position += stream.consumed


def share_bytes(sources: Sequence[InputFile], *, segment_bytes: int = SEGMENT_BYTES, share: tuple[int, int]) -> int:
    """Bytes on disk of a share, for the progress display; 0 if any is unknown."""
    units = list(_units_of_share(sources, segment_bytes, share))
    return 0 if any(unit.source.kind == "stdin" for unit in units) else sum(unit.size for unit in units)


def _units_of_share(sources: Sequence[InputFile], segment_bytes: int, share: tuple[int, int]) -> Iterator[_Unit]:
    rank, world = share
    if world == 1:
        yield from _units(sources, segment_bytes)
        return
    for source in sources:
        if source.kind == "stdin":
            way_out = "write it to files first, or run one partition"
            raise ConfigError(f"--input {source.path}: {world} partitions cannot share a pipe; {way_out}")
    units = list(_units(sources, segment_bytes))
    total = max(1, sum(unit.size for unit in units))
    before = 0
    for unit in units:
        # Assigned by its middle: a unit across a boundary goes to the side with most of it.
        middle = min(before * 2 + unit.size, total * 2 - 1)
        if middle * world // (total * 2) == rank:
            yield unit
        before += unit.size


def _units(sources: Sequence[InputFile], segment_bytes: int) -> Iterator[_Unit]:
    for source in sources:
        if source.kind == "lines":
            for start in range(0, source.size, segment_bytes):
                stop = min(start + segment_bytes, source.size)
                yield _Unit(source, start, stop, stop - start)
        elif source.kind == "parquet":
            for start, stop, size in row_group_runs(source, segment_bytes):
                yield _Unit(source, start, stop, size)
        else:
            yield _Unit(source, 0, source.size, source.size)


def read_batches(segment: Segment, keys: Sequence[str]) -> Iterator[Batch]:
    source = segment.source
    if segment.data is not None:
        yield from _line_batches(io.BytesIO(segment.data), segment, keys)
    elif source.kind == "parquet":
        yield from read_rows(source, segment.start, segment.stop, keys)
    else:
        with _opened(source) as file:
            if segment.start == 0 or _seek_line(file, segment):
                yield from _line_batches(file, segment, keys)


def count_lines(source: InputFile, start: int, stop: int) -> int:
    """Counts the lines that begin in these bytes, or the rows in these row groups."""
    if source.kind == "parquet":
        return count_rows(source, start, stop)
    if stop <= start:
        return 0
    # A line begins at 0, and after each line end except one directly before `stop`.
    count, position = (1, 0) if start == 0 else (0, start - 1)
    with _opened(source) as file:
        file.seek(position)
        while data := file.read(min(BATCH_BYTES, stop - 1 - position)):
            count += data.count(b"\n")
            position += len(data)
    return count


@contextmanager
def _opened(source: InputFile) -> Iterator[BinaryIO]:
    try:
        with source.opened(1 << 16) as file:
            yield file
    except OSError as error:
        way_out = "check the disk, or fetch the file again"
        raise DataError(f"{source.path}: reading failed ({error.strerror or error}); {way_out}") from None


def _seek_line(file: BinaryIO, segment: Segment) -> bool:
    """Seeks to the first line that begins in the segment; False if there is none."""
    file.seek(segment.start - 1)
    while part := file.readline(BATCH_BYTES):
        if part.endswith(b"\n"):
            return True
        if file.tell() >= segment.stop:
            return False
    return True  # the file was truncated; reported below


def _line_batches(file: BinaryIO, segment: Segment, keys: Sequence[str]) -> Iterator[Batch]:
    line, position, wanted = 0, file.tell(), min(_FIRST_BYTES, BATCH_BYTES)
    while position < segment.stop:
        block = take_lines(file, min(wanted, segment.stop - position))
        if not block:
            raise DataError(f"{segment.source.path}: truncated while it was read; run again when it is complete")
        size = file.tell() - position
        if position == 0 and segment.data is None:
            block = block.removeprefix(UTF8_BOM)
        batch = parse_lines(block, keys, line)
        batch.size = size
        yield batch
        line += batch.lines
        position += size
        wanted = max(1, min(BATCH_BYTES, BATCH_LINES * size // max(1, batch.lines)))

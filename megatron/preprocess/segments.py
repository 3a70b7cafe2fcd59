"""Sources cut into segments, and a segment read back as batches of documents.

The cut depends on the content alone: not on the number of workers, and not on the share of a partition.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from megatron.errors import ConfigError, DataError
from megatron.preprocess.documents import BadLine, Texts, parse_block
from megatron.preprocess.sources import UTF8_BOM, Source
from megatron.preprocess.streams import SourceStream, take_lines

SEGMENT_BYTES = 32 << 20
BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    source: Source
    number: int  # over the whole share, from 0
    start: int  # lines: the lines that begin in these bytes; parquet: these row groups; streams: 0 to len(data)
    stop: int
    data: bytes | None  # streams: whole lines
    position: int  # bytes on disk of all inputs (of the share) that have been consumed when it is done


@dataclass(slots=True)
class Batch:
    """Consecutive lines of a segment, about 1 MB. An item of a JSON array or a row is a line here."""

    first_line: int  # within the segment, from 0
    lines: int  # blank and bad ones included
    size: int  # bytes consumed
    documents: list[tuple[int, list[Texts]]]  # the line within the segment, and for each key its texts
    blank: int
    bad: list[BadLine]  # numbers within the segment


def plan_segments(
    sources: Sequence[Source], *, segment_bytes: int = SEGMENT_BYTES, share: tuple[int, int] = (0, 1)
) -> Iterator[Segment]:
    """Share (rank, world) is a contiguous run; the shares of all ranks laid end to end are the whole."""
    before = 0
    number = 0
    for source in sources:
        if source.kind == "lines":
            for start in range(0, source.size, segment_bytes):
                stop = min(start + segment_bytes, source.size)
                yield Segment(source, number, start, stop, None, before + stop)
                number += 1
        else:
            stream = SourceStream(source)
            for data in stream.pieces(segment_bytes):
                yield Segment(source, number, 0, len(data), data, before + stream.consumed)
                number += 1
        before += source.size


def read_batches(segment: Segment, keys: Sequence[str]) -> Iterator[Batch]:
    if segment.data is not None:
        yield from _batches(io.BytesIO(segment.data), segment, keys)
        return
    source = segment.source
    try:
        with open(source.path, "rb", buffering=1 << 16) as file:
            if segment.start and not _seek_line(file, segment):
                return
            yield from _batches(file, segment, keys)
    except PermissionError:
        raise ConfigError(f"--input {source.path}: may not be read; check its permissions") from None
    except OSError as error:
        raise DataError(f"{source.path}: reading failed ({error.strerror or error})") from None


def _seek_line(file: BinaryIO, segment: Segment) -> bool:
    """To the first line that begins in the segment; False if none does."""
    file.seek(segment.start - 1)
    while part := file.readline(BATCH_BYTES):
        if part.endswith(b"\n"):
            return file.tell() < segment.stop
        if file.tell() >= segment.stop:
            return False
    return False


def _batches(file: BinaryIO, segment: Segment, keys: Sequence[str]) -> Iterator[Batch]:
    line, position = 0, file.tell()
    while position < segment.stop:
        block = take_lines(file, min(BATCH_BYTES, segment.stop - position))
        if not block:
            raise DataError(f"{segment.source.path}: became shorter while it was read; run again when it is complete")
        size = file.tell() - position
        if segment.data is None and position == 0:
            block = block.removeprefix(UTF8_BOM)
        documents, blank, bad, lines = parse_block(block, keys, line)
        yield Batch(line, lines, size, documents, blank, bad)
        line += lines
        position += size

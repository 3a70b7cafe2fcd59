"""Reads compressed files, JSON arrays and pipes as streams of lines."""

import dataclasses
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any, BinaryIO, cast

from megatron.errors import DataError
from megatron.preprocess.input.arrays import ArrayError, array_lines
from megatron.preprocess.input.content import UTF8_BOM, begins_array, reader_of
from megatron.preprocess.input.documents import TOO_LONG
from megatron.preprocess.input.files import STDIN, InputFile

MAX_LINE_BYTES = 1 << 30  # a longer line means a damaged file or a decompression bomb
_READ_BYTES = 1 << 18
_GZIP_STEP_BYTES = 1 << 22  # most bytes decompressed in one step
_ZSTD_READ_BYTES = 1 << 12  # zstd lacks such a limit; 4 bytes expand to at most 128 KiB, so one read to 128 MiB
_LOOKED_THROUGH = 1 << 20  # bytes of a pipe to search for the beginning of an array


def take_lines(stream: BinaryIO, size: int) -> bytes:
    """Reads `size` bytes, fewer at the end of the stream, plus the rest of the last line; b"" at the end."""
    block = stream.read(min(size, MAX_LINE_BYTES))
    if not block or block.endswith(b"\n"):
        return block
    last_line = block.rfind(b"\n") + 1
    parts, length = [block], len(block) - last_line
    while part := stream.readline(_READ_BYTES):
        ended = part.endswith(b"\n")
        length += len(part) - ended
        if length > MAX_LINE_BYTES:
            if not ended:
                _skip_line(stream)
            return block[:last_line] + TOO_LONG + b"\n"
        parts.append(part)
        if ended:
            break
    return b"".join(parts)


def _skip_line(stream: BinaryIO) -> None:
    while (part := stream.readline(_READ_BYTES)) and not part.endswith(b"\n"):
        pass


class SourceStream:
    """One input file, read once. `source` is updated if a pipe turns out to hold an array."""

    def __init__(self, source: InputFile) -> None:
        self.source = source
        self.consumed = 0  # bytes on disk
        self._lines = 0  # whole lines so far

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yields pieces of whole lines, all but the last at least `size` bytes. Only the content determines the cut."""
        try:
            with _open(self.source) as raw:
                stream = io.BufferedReader(_ChunkFile(self._line_chunks(raw)), _READ_BYTES)
                while piece := take_lines(cast(BinaryIO, stream), size):
                    yield piece
        except ArrayError as error:
            way_out = "give one array of objects, or one object per line"
            raise DataError(f"{self.source.place(error.item)}: {error.reason}; {way_out}") from None
        except (zlib.error, EOFError, _ZstdError) as error:
            what = f"damaged {self.source.kind} file after {self.source.unit} {self._lines}"
            raise DataError(f"{self.source.path}: {what} ({error}); fetch it again") from None
        except OSError as error:
            what = f"reading failed after {self.source.unit} {self._lines} ({error.strerror or error})"
            raise DataError(f"{self.source.path}: {what}; check the disk, or fetch the file again") from None

    def _line_chunks(self, raw: BinaryIO) -> Iterator[bytes]:
        chunks = _without_mark(self._unpacked(raw))
        if self.source.kind == "stdin":
            chunks = self._look_for_array(chunks)
        if self.source.array:
            chunks = array_lines(chunks, MAX_LINE_BYTES)
        for chunk in chunks:
            self._lines += chunk.count(b"\n")
            yield chunk

    def _look_for_array(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        head = b""
        for chunk in chunks:
            head += chunk
            begun = head.lstrip()
            # The content after the first line decides whether this is an array.
            if begun[:1] not in (b"", b"[") or begun.partition(b"\n")[2].strip() or len(head) > _LOOKED_THROUGH:
                break
        if begins_array(head):
            self.source = dataclasses.replace(self.source, array=True)
        return chain([head], chunks)

    def _unpacked(self, raw: BinaryIO) -> Iterator[bytes]:
        if self.source.kind == "gzip":
            return self._gunzip(raw)
        if self.source.kind == "zstd":
            return self._unzstd(raw)
        return self._read(raw, _READ_BYTES)

    def _read(self, raw: BinaryIO, size: int) -> Iterator[bytes]:
        while data := raw.read(size):
            self.consumed += len(data)
            yield data

    def _gunzip(self, raw: BinaryIO) -> Iterator[bytes]:
        member: Any = None
        first = True
        for data in self._read(raw, _READ_BYTES):
            while data:
                if member is None:
                    data = data if first else data.lstrip(b"\0")  # members may be padded
                    if not data:
                        break
                    member, first = zlib.decompressobj(wbits=31), False
                yield member.decompress(data, _GZIP_STEP_BYTES)
                data = member.unconsumed_tail
                if member.eof:
                    data, member = member.unused_data, None
        if member is not None:
            raise EOFError("it ends too early")

    def _unzstd(self, raw: BinaryIO) -> Iterator[bytes]:
        zstandard = reader_of(".zst")
        decompressor = zstandard.ZstdDecompressor()
        frame: Any = None
        try:
            for data in self._read(raw, _ZSTD_READ_BYTES):
                while data:
                    frame = frame or decompressor.decompressobj()
                    yield frame.decompress(data)
                    data = frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame = None
        except zstandard.ZstdError as error:
            long_window = "too much memory" in str(error)
            reason = "its window is over 128 MiB, compress it without --long" if long_window else str(error)
            raise _ZstdError(reason) from None
        if frame is not None:
            raise EOFError("it ends too early")


class _ZstdError(Exception):
    """Placeholder for ZstdError, which exists only if its package is installed."""


def _without_mark(chunks: Iterator[bytes]) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= len(UTF8_BOM):
            break
    yield head.removeprefix(UTF8_BOM)
    yield from chunks


def _open(source: InputFile) -> Any:
    if source.identity == STDIN:
        # Unbuffered, because Python aborts at exit if a thread that waits for input holds the buffer's lock.
        return nullcontext(getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))
    return source.opened(0 if source.kind == "stdin" else _READ_BYTES)


class _ChunkFile(io.RawIOBase):
    """A file over an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._chunk:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._chunk = memoryview(chunk)
        count = min(len(buffer), len(self._chunk))
        buffer[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

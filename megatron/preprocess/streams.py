"""Sources that are read from beginning to end (compressed files, JSON arrays, pipes) as one stream of lines."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

from megatron.errors import ConfigError, DataError
from megatron.preprocess.sources import STDIN, Source

MAX_LINE_BYTES = 1 << 30  # a longer line is no document but a damaged file (or a decompression bomb)
# Stands in the place of a line that was longer: no JSON, so that a real line like it would be a bad line as well.
TOO_LONG = b"\xff\xfe line too long"
_READ_BYTES = 1 << 18
_OUTPUT_BYTES = 1 << 22  # gzip: most bytes that one step unpacks
_ZSTD_READ_BYTES = 1 << 12  # zstd has no such limit, but packs at most 128 KiB into 4 bytes: 128 MiB from one read


def take_lines(stream: BinaryIO, size: int, max_line_bytes: int = MAX_LINE_BYTES) -> bytes:
    """Whole lines: `size` bytes (less at the end of the stream) and what the last line lacks; b"" at the end."""
    block = stream.read(min(size, max_line_bytes))
    if not block or block.endswith(b"\n"):
        return block
    held = len(block) - (block.rfind(b"\n") + 1)
    rest = stream.readline(max_line_bytes - held + 1)
    if held + len(rest) <= max_line_bytes or rest.endswith(b"\n"):
        return block + rest if rest else block
    del rest
    while (part := stream.readline(_READ_BYTES)) and not part.endswith(b"\n"):
        pass
    return block[: len(block) - held] + TOO_LONG + b"\n"


class SourceStream:
    """The lines of a source, with how much of it has been read. An element of a JSON array is one line."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.consumed = 0  # bytes on disk
        self._lines = 0  # taken

    def pieces(self, size: int) -> Iterator[bytes]:
        """Whole lines of about `size` bytes each; how they are cut depends on nothing but the content."""
        try:
            with _open(self.source) as raw:
                chunks = self._unpacked(raw)
                head = next(chunks, b"")
                while len(head) < 3 and (more := next(chunks, b"")):  # enough to know the mark of UTF-8
                    head += more
                while not head.strip() and (more := next(chunks, b"")):
                    head += more  # TODO bounded
                yield from self._cut(head, chunks, size)
        except (zlib.error, EOFError) as error:
            raise DataError(f"{self._place()}: damaged {self.source.kind} file ({error}); fetch it again") from None
        except PermissionError:
            raise ConfigError(f"--input {self.source.path}: may not be read; check its permissions") from None
        except OSError as error:
            raise DataError(f"{self._place()}: reading failed ({error.strerror or error})") from None

    def _cut(self, head: bytes, chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
        from megatron.preprocess.sources import UTF8_BOM

        stream = as_file(_chain(head.removeprefix(UTF8_BOM), chunks))
        while piece := take_lines(stream, size):
            self._lines += piece.count(b"\n")
            yield piece

    def _place(self) -> str:
        return f"{self.source.path}, after {self.source.unit} {self._lines}"

    def _unpacked(self, raw: BinaryIO) -> Iterator[bytes]:
        if self.source.kind == "gzip":
            return self._gunzip(raw)
        return self._read(raw, _READ_BYTES)

    def _read(self, raw: BinaryIO, size: int) -> Iterator[bytes]:
        while data := raw.read(size):
            self.consumed += len(data)
            yield data

    def _gunzip(self, raw: BinaryIO) -> Iterator[bytes]:
        member: Any = None
        for data in self._read(raw, _READ_BYTES):
            while data:
                if member is None:
                    data = data.lstrip(b"\0") if self.consumed > len(data) else data
                    if not data:
                        break
                    member = zlib.decompressobj(wbits=31)
                yield member.decompress(data, _OUTPUT_BYTES)
                data = member.unconsumed_tail
                if member.eof:
                    data, member = member.unused_data, None
        if member is not None:
            raise EOFError("it ends too early")


def _chain(head: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield head
    yield from rest


def _open(source: Source) -> BinaryIO:
    if source.identity == STDIN:
        return cast(BinaryIO, sys.stdin.buffer)
    return open(source.path, "rb", buffering=0 if source.kind == "stdin" else _READ_BYTES)


class _ChunkFile(io.RawIOBase):
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


def as_file(chunks: Iterator[bytes]) -> BinaryIO:
    return io.BufferedReader(_ChunkFile(chunks), _READ_BYTES)


def zstandard_module() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigError("--input: .zst files need the package zstandard; pip install zstandard") from None
    return zstandard

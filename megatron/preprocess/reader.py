"""Input files to chunks of lines, streaming: memory is that of one chunk, whatever the size of the corpus."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from megatron.errors import ConfigError, DataError

CHUNK_BYTES = 1 << 20  # a chunk is closed when it holds this much, so that long documents spread over the workers
MAX_LINE_BYTES = 1 << 30  # a longer line is no document but a damaged file (or a decompression bomb)
_UTF8_BOM = b"\xef\xbb\xbf"
_NOT_YET = {".zst": "zstd -d", ".parquet": "", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines of one file. A line of None was longer than the limit and has not been kept."""

    path: str
    first_line: int
    lines: list[bytes | None]
    size: int  # bytes of the lines
    position: int  # bytes of all the input files, as they lie on disk, that have been read when it ends


def expand_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files in the order given, each pattern's matches sorted."""
    files: list[Path] = []
    for pattern in patterns:
        if Path(pattern).exists():
            found = [pattern]
        elif glob.has_magic(pattern):
            found = sorted(glob.glob(pattern, recursive=True))
        else:
            raise ConfigError(f"--input {pattern}: there is no such file; check the path")
        if not found:
            raise ConfigError(f"--input {pattern}: no file matches the pattern")
        files.extend(_check_input(Path(name)) for name in found)
    seen: set[tuple[int, int]] = set()
    for file in files:
        status = file.stat()
        if (status.st_dev, status.st_ino) in seen:
            raise ConfigError(f"--input {file}: given twice, so its documents would count twice; name it once")
        seen.add((status.st_dev, status.st_ino))
    return files


def _check_input(path: Path) -> Path:
    if path.is_dir():
        raise ConfigError(f"--input {path}: folders are not supported yet; use a pattern: --input '{path}/*.jsonl'")
    if path.suffix in _NOT_YET:
        way = f"decompress it first ({_NOT_YET[path.suffix]})" if _NOT_YET[path.suffix] else "write it as JSON lines"
        raise ConfigError(f"--input {path}: {path.suffix} is not supported yet; {way}")
    return path


def input_bytes(files: Sequence[Path]) -> int:
    """Size on disk, for the progress display (0 for what has none, such as a pipe)."""
    return sum(path.stat().st_size for path in files)


def read_chunks(files: Sequence[Path], chunk_size: int, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Chunk]:
    """Chunks of at most `chunk_size` lines."""
    before = 0
    for path in files:
        for chunk in _read_file(path, chunk_size, max_line_bytes, before):
            before = chunk.position
            yield chunk


def _read_file(path: Path, chunk_size: int, max_line_bytes: int, before: int) -> Iterator[Chunk]:
    number = 0
    try:
        with open(path, "rb", buffering=1 << 18) as raw:
            compressed = path.suffix == ".gz"
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if compressed else raw
            read = 0
            while True:
                lines, size = _take_lines(stream, chunk_size, max_line_bytes)
                if not lines:
                    return
                if number == 0 and lines[0] is not None:
                    lines[0] = lines[0].removeprefix(_UTF8_BOM)
                read += size
                yield Chunk(str(path), number + 1, lines, size, before + (raw.tell() if compressed else read))
                number += len(lines)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file after line {number} ({error}); fetch it again") from None
    except PermissionError:
        raise ConfigError(f"--input {path}: may not be read; check its permissions") from None
    except OSError as error:
        raise DataError(f"{path}: reading failed after line {number} ({error.strerror or error})") from None


def _take_lines(stream: BinaryIO, chunk_size: int, max_line_bytes: int) -> tuple[list[bytes | None], int]:
    lines: list[bytes | None] = []
    size = 0
    while len(lines) < chunk_size and size < CHUNK_BYTES:
        line = stream.readline(max_line_bytes + 1)
        if not line:
            break
        size += len(line)
        if len(line) > max_line_bytes and not line.endswith(b"\n"):
            size += _skip_rest_of_line(stream)
            lines.append(None)
        else:
            lines.append(line)
    return lines, size


def _skip_rest_of_line(stream: BinaryIO) -> int:
    skipped = 0
    while part := stream.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped

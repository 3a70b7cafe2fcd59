"""What --input names, as a list of sources: files, patterns, folders, URLs of them, or standard input."""

from __future__ import annotations

import glob
import json
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron.data import remote
from megatron.errors import ConfigError, DataError

STDIN = "-"
STDIN_NAME = "standard input"
UTF8_BOM = b"\xef\xbb\xbf"
KINDS = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}
IN_FOLDERS = (".jsonl", ".json", ".ndjson", *KINDS)
_BEGINNINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_SNIFFED_BYTES = 1 << 14
_UNPACKED_BYTES = 1 << 20  # of which blanks may come first
_NOT_READ = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".7z": "7z x", ".tar": "tar xf", ".tgz": "tar xf"}
_OWN_RECORDS = ("_document.meta.json", "_sentence.meta.json")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file, or a pipe."""

    path: str  # as it is shown in messages
    kind: str  # "lines", "gzip", "zstd", "parquet", "array" (one JSON array, not compressed), "stdin" (any pipe)
    size: int  # bytes on disk, 0 if unknown
    identity: str  # absolute path, size and time of change: the same identity is the same content
    array: bool = False  # it holds one JSON array, compressed or not; of pipes this is seen when they are read

    @property
    def unit(self) -> str:
        """What its documents are counted in."""
        return "row" if self.kind == "parquet" else "item" if self.array else "line"

    def place(self, number: int) -> str:
        """Where a document stands; `number` counts from 1."""
        return f"{self.path}:{number}" if self.unit == "line" else f"{self.path}, {self.unit} {number}"

    def refuse_change(self, file: BinaryIO | None = None) -> None:
        """What a file was when the run was planned it must be to the end. None: that of this name now."""
        if self.kind == "stdin":
            return
        if remote.is_url(self.path):
            there = remote.status_of(self.path)
            size, version = there.size, _remote_version(there)
        else:
            status = Path(self.path).stat() if file is None else os.fstat(file.fileno())
            size, version = status.st_size, _version(status)
        if not self.identity.endswith(f" {version}"):
            raise DataError(
                f"{self.path}: was changed while it was read ({self.size} bytes before, {size} now); "
                "run again when nobody writes it"
            )

    def open(self, buffering: int) -> BinaryIO:
        """Not standard input."""
        if remote.is_url(self.path):
            return cast(BinaryIO, remote.open_remote(self.path, self.size, buffering))
        return open(self.path, "rb", buffering=buffering)


def expand_inputs(patterns: Sequence[str]) -> list[Source]:
    """Files in the order given, the matches of each pattern and the content of each folder sorted by name."""
    if STDIN in patterns:
        if len(patterns) > 1:
            raise ConfigError(f"--input {' '.join(patterns)}: - is standard input and is given alone; name it once")
        return [_standard_input()]
    sources: list[Source] = []
    seen: set[object] = set()
    for pattern in patterns:
        for path in _files_of(pattern):
            source, file = _remote_source(path) if remote.is_url(path) else _source(path)
            if file in seen:
                raise ConfigError(f"--input {path}: given twice, so its documents would count twice; name it once")
            seen.add(file)
            sources.append(source)
    return sources


def input_bytes(sources: Sequence[Source]) -> int:
    """Size on disk, for the progress display (0 if that of any is unknown)."""
    return 0 if any(source.kind == "stdin" for source in sources) else sum(source.size for source in sources)


def _version(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def _remote_version(status: remote.RemoteStatus) -> str:
    return f"{status.size} {status.version}"


def _files_of(pattern: str) -> Iterator[str]:
    if remote.is_url(pattern):
        yield from _remote_files_of(pattern)
        return
    if not os.path.lexists(pattern) and Path(pattern).name == "**":
        pattern = str(Path(pattern).parent)  # all that lies in it, however deep: the folder itself
    if os.path.lexists(pattern):
        found = [pattern]
    elif glob.has_magic(pattern):
        found = sorted(glob.glob(pattern, recursive=True))
        if "**" in pattern:  # it matches folders and what lies in them
            found = [name for name in found if not Path(name).is_dir()]
        if not found:
            raise ConfigError(f"--input {pattern}: no file matches the pattern; check the path")
    else:
        raise ConfigError(f"--input {pattern}: there is no such file; check the path")
    for name in found:
        if Path(name).is_dir():
            yield from _files_in(name)
        else:
            yield name


def _files_in(folder: str) -> list[str]:
    """Files with a known ending, however deep. Links to folders are followed, each folder once."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for current, folders, names in os.walk(folder, onerror=_raise_unreadable, followlinks=True):
        status = Path(current).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [str(Path(current) / name) for name in sorted(names) if not name.startswith(".")]
        found += [path for path in paths if _is_data(path)]
    if not found:
        raise ConfigError(f"--input {folder}: the folder holds no {', '.join(IN_FOLDERS)} files; check the path")
    return sorted(found)


def _remote_files_of(pattern: str) -> list[str]:
    if remote.has_magic(pattern):
        found = remote.matches(pattern)
        if not found:
            raise ConfigError(f"--input {pattern}: no object matches the pattern; check the address")
        return found
    if not remote.is_folder(pattern):
        return [pattern]
    names = remote.files_in(pattern)
    found = [name for name in names if _is_data(name) and not _is_own_record(name, names)]
    if not found:
        raise ConfigError(f"--input {pattern}: the folder holds no {', '.join(IN_FOLDERS)} files; check the address")
    return found


def _is_own_record(name: str, names: Sequence[str]) -> bool:
    """The record of a dataset that an earlier run wrote beside its input."""
    return name.endswith(_OWN_RECORDS) and name.removesuffix(".meta.json") + ".idx" in names


def _raise_unreadable(error: OSError) -> None:
    raise ConfigError(f"--input {error.filename}: may not be read ({error.strerror}); check its permissions") from None


def _is_data(path: str) -> bool:
    """Also what would be data if it could be read (x.jsonl.bz2): it is refused, not passed over."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    if path.endswith(_OWN_RECORDS) and Path(path.removesuffix(".meta.json") + ".idx").exists():
        return False  # the record of a dataset that an earlier run wrote beside its input
    return bool(suffixes) and (suffixes[-1] in IN_FOLDERS or (suffixes[0] in IN_FOLDERS and suffixes[-1] in _NOT_READ))


def _refuse_unread(path: str) -> None:
    for suffix in (suffix.lower() for suffix in Path(path).suffixes[-2:]):
        if suffix in _NOT_READ:
            raise ConfigError(f"--input {path}: {suffix} is not read; unpack it first ({_NOT_READ[suffix]})")


def _remote_source(url: str) -> tuple[Source, str]:
    _refuse_unread(url)
    status = remote.status_of(url)
    with remote.open_remote(url, status.size, _SNIFFED_BYTES) as file:
        kind, array = _look_into(file, url, status.size)
    return Source(url, kind, status.size, f"{url} {_remote_version(status)}", array), url


def _source(path: str) -> tuple[Source, tuple[int, int]]:
    _refuse_unread(path)
    try:
        status = Path(path).stat()
        if stat.S_ISFIFO(status.st_mode):
            kind, array = "stdin", False
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                kind, array = _look_into(file, path, status.st_size)
        else:
            raise ConfigError(f"--input {path}: neither a file nor a pipe; give files that hold JSON lines")
    except PermissionError:
        raise ConfigError(f"--input {path}: may not be read; check its permissions") from None
    except FileNotFoundError:
        raise ConfigError(f"--input {path}: there is no such file (a broken link?); check the path") from None
    except OSError as error:
        raise ConfigError(f"--input {path}: cannot be read ({error.strerror or error}); check the path") from None
    size = 0 if kind == "stdin" else status.st_size
    identity = f"{Path(path).resolve()} {_version(status)}"
    return Source(path, kind, size, identity, array), (status.st_dev, status.st_ino)


def _standard_input() -> Source:
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("--input -: standard input is closed; pipe the text into the tool, or name files")
    if sys.stdin.isatty():
        raise ConfigError("--input -: standard input is a terminal; pipe the text into the tool, or name files")
    return Source(STDIN_NAME, "stdin", 0, STDIN)


def _look_into(file: BinaryIO, path: str, size: int) -> tuple[str, bool]:
    """The kind, by the name's ending or else by the first bytes, and whether it holds one JSON array."""
    head = file.read(_SNIFFED_BYTES)
    if head and not size:
        return "stdin", False  # some file systems do not know sizes; it must not pass for empty
    kind = KINDS.get(Path(path).suffix.lower())
    if kind is None:
        kind = next((kind for beginning, kind in _BEGINNINGS.items() if head.startswith(beginning)), "lines")
    if kind == "lines" and begins_array(_behind_blanks(file, head)):
        return "array", True
    if kind == "parquet":
        pyarrow_parquet()  # said before anything is read
    if kind in ("gzip", "zstd") and not size:
        raise ConfigError(
            f"--input {path}: has 0 bytes, and nothing at all packed has more; fetch it again, or leave it out"
        )
    return kind, kind in ("gzip", "zstd") and begins_array(_decompressed_head(kind, head))


def _behind_blanks(file: BinaryIO, head: bytes) -> bytes:
    """The first bytes with anything in them."""
    while head and not head.removeprefix(UTF8_BOM).strip():
        head = file.read(_SNIFFED_BYTES)
    return head


def begins_array(head: bytes) -> bool:
    """One JSON array; not lines of which the first is a list by itself."""
    head = head.removeprefix(UTF8_BOM).lstrip()
    line, _, others = head.partition(b"\n")
    return head.startswith(b"[") and not (others.strip() and _is_json(line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def zstandard_module() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigError("--input: reading .zst needs the package zstandard; pip install zstandard") from None
    return zstandard


def pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("--input: reading .parquet needs the package pyarrow; pip install pyarrow") from None
    return pyarrow.parquet


def _decompressed_head(kind: str, head: bytes) -> bytes:
    """As far as it can be had; damage is reported when the file is read."""
    if kind == "gzip":
        try:
            return zlib.decompressobj(wbits=31).decompress(head, _UNPACKED_BYTES)
        except zlib.error:
            return b""
    zstandard = zstandard_module()
    try:
        found: bytes = zstandard.ZstdDecompressor().stream_reader(head).read(_UNPACKED_BYTES)
        return found
    except zstandard.ZstdError:
        return b""

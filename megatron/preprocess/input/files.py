"""Expands --input (files, patterns, folders, their URLs, standard input) to a list of input files."""

import glob
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from megatron.data import remote
from megatron.errors import ConfigError, DataError, without_secrets
from megatron.preprocess.input.content import KINDS, SNIFFED_BYTES, look_into

STDIN = "-"
STDIN_NAME = "standard input"
IN_FOLDERS = (".jsonl", ".json", ".ndjson", *KINDS)
_NOT_READ = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".7z": "7z x", ".tar": "tar xf", ".tgz": "tar xf"}
_OWN_RECORDS = ("_document.meta.json", "_sentence.meta.json")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file, or a pipe."""

    path: str  # as shown in messages and records; unique
    kind: str  # "lines", "gzip", "zstd", "parquet", "array" (one JSON array, not compressed), "stdin" (any pipe)
    size: int  # bytes on disk, 0 if unknown
    identity: str  # absolute path, size and modification time; equal identities mean equal content
    array: bool = False  # is one JSON array, compressed or not; for pipes known only when read
    url: str | None = None  # complete; `path` leaves out its password

    @property
    def unit(self) -> str:
        """Unit in which its documents are counted."""
        return "row" if self.kind == "parquet" else "item" if self.array else "line"

    def place(self, number: int) -> str:
        """Returns the place of a document for messages; `number` counts from 1."""
        return f"{self.path}:{number}" if self.unit == "line" else f"{self.path}, {self.unit} {number}"

    @contextmanager
    def opened(self, buffering: int) -> Iterator[BinaryIO]:
        """Opens a file or URL, but not standard input. Raises if it has changed since the run was planned."""
        try:
            with self._open(buffering) as file:
                self._refuse_change(file)
                yield file
                self._refuse_change(file)
        except PermissionError:
            raise ConfigError(f"--input {self.path}: permission denied; check its permissions") from None
        except FileNotFoundError:
            raise DataError(f"{self.path}: removed while it was read; restore it, and run again") from None

    def _refuse_change(self, file: BinaryIO) -> None:
        if self.kind == "stdin":
            return
        if self.url is not None:
            there = remote.status_of(self.url)
            size, version = there.size, _remote_version(there)
        else:
            status = os.fstat(file.fileno())
            size, version = status.st_size, _version(status)
        if not self.identity.endswith(f" {version}"):
            raise DataError(
                f"{self.path}: changed while it was read ({self.size} bytes before, {size} now); "
                "run again when no process writes it"
            )

    def _open(self, buffering: int) -> BinaryIO:
        if self.url is not None:
            return cast(BinaryIO, remote.open_remote(self.url, self.size, buffering))
        return open(self.path, "rb", buffering=buffering)


def expand_inputs(patterns: Sequence[str]) -> list[InputFile]:
    """Expands words to files in the given order. Matches and folder contents are sorted by name."""
    if STDIN in patterns:
        if len(patterns) > 1:
            raise ConfigError(f"--input {' '.join(patterns)}: standard input (-) excludes other inputs; give only -")
        return [_standard_input()]
    sources: list[InputFile] = []
    seen: set[object] = set()
    for pattern in patterns:
        for path in _files_of(pattern):
            source, file = _remote_source(path) if remote.is_url(path) else _source(path)
            if file in seen:
                raise ConfigError(f"--input {path}: given twice, so its documents would count twice; give it once")
            seen.add(file)
            sources.append(source)
    return _told_apart(sources)


def _told_apart(sources: Sequence[InputFile]) -> list[InputFile]:
    """Numbers the paths of URLs that differ only in their hidden secrets."""
    found: Counter[str] = Counter()
    named = []
    for source in sources:
        found[source.path] += 1
        again = "" if found[source.path] == 1 else f" ({found[source.path]})"
        named.append(replace(source, path=source.path + again))
    return named


def input_bytes(sources: Sequence[InputFile]) -> int:
    """Size on disk, for the progress display; 0 if the size of any is unknown."""
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
        pattern = str(Path(pattern).parent)  # everything below a folder, same as the folder
    if os.path.lexists(pattern):
        found = [pattern]
    elif glob.has_magic(pattern):
        found = sorted(glob.glob(pattern, recursive=True))
        if "**" in pattern:  # it matches folders and also their content
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
    """Returns all files with a known ending below a folder. Follows links, but visits each folder once."""
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
        found += [path for path in paths if _is_data(path, paths)]
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
    found = [name for name in names if _is_data(name, names)]
    if not found:
        raise ConfigError(f"--input {pattern}: the folder holds no {', '.join(IN_FOLDERS)} files; check the address")
    return found


def _raise_unreadable(error: OSError) -> None:
    raise ConfigError(f"--input {error.filename}: cannot be read ({error.strerror}); check its permissions") from None


def _is_data(path: str, beside: Sequence[str]) -> bool:
    """True for data, even in unsupported formats (x.jsonl.bz2), which are rejected instead of skipped."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    if path.endswith(_OWN_RECORDS) and path.removesuffix(".meta.json") + ".idx" in beside:
        return False  # the record of a dataset that an earlier run wrote beside its input
    return bool(suffixes) and (suffixes[-1] in IN_FOLDERS or (suffixes[0] in IN_FOLDERS and suffixes[-1] in _NOT_READ))


def _refuse_unread(path: str) -> None:
    for suffix in (suffix.lower() for suffix in Path(path).suffixes[-2:]):
        if suffix in _NOT_READ:
            raise ConfigError(f"--input {path}: {suffix} is not supported; unpack it first ({_NOT_READ[suffix]})")


def _remote_source(url: str) -> tuple[InputFile, str]:
    _refuse_unread(url)
    status = remote.status_of(url)
    with remote.open_remote(url, status.size, SNIFFED_BYTES) as file:
        kind, array = look_into(file, url, status.size)
    shown = without_secrets(url)
    return InputFile(shown, kind, status.size, f"{shown} {_remote_version(status)}", array, url), url


def _source(path: str) -> tuple[InputFile, tuple[int, int]]:
    _refuse_unread(path)
    try:
        status = Path(path).stat()
        if stat.S_ISFIFO(status.st_mode):
            kind, array = "stdin", False
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                kind, array = look_into(file, path, status.st_size)
        else:
            raise ConfigError(f"--input {path}: neither a file nor a pipe; give files of JSON lines")
    except PermissionError:
        raise ConfigError(f"--input {path}: permission denied; check its permissions") from None
    except FileNotFoundError:
        raise ConfigError(f"--input {path}: there is no such file (a broken link?); check the path") from None
    except OSError as error:
        raise ConfigError(f"--input {path}: cannot be read ({error.strerror or error}); check the path") from None
    size = 0 if kind == "stdin" else status.st_size
    identity = f"{Path(path).resolve()} {_version(status)}"
    return InputFile(path, kind, size, identity, array), (status.st_dev, status.st_ino)


def _standard_input() -> InputFile:
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("--input -: standard input is closed; pipe the text into the tool, or give files")
    if sys.stdin.isatty():
        raise ConfigError("--input -: standard input is a terminal; pipe the text into the tool, or give files")
    return InputFile(STDIN_NAME, "stdin", 0, STDIN)

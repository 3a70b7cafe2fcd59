"""Files behind a URL (s3://, gs://, https://, file://, memory://, ...), through fsspec.

fsspec is imported when the first URL is met. A range that comes back short is requested again,
and then is an error that names the URL; it is never taken for the end of the file.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError, MegatronError, StorageError
from megatron.utils.durable import write_atomically

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
_VERSIONS = ("ETag", "etag", "VersionId", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
PAUSES = (0.5, 1.0, 2.0)  # seconds before each retry


def is_url(name: str | Path) -> bool:
    return isinstance(name, str) and _URL.match(name) is not None


@dataclass(frozen=True)
class RemoteStatus:
    size: int
    version: str  # equal versions mean equal content, as far as the store tells


def _store(url: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL."""
    scheme = url.partition("://")[0].lower()
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(f"{url}: reading URLs needs the package fsspec; pip install fsspec") from None
    try:
        store, path = url_to_fs(url)
    except ImportError:
        package = _PACKAGES.get(scheme, f"of fsspec for {scheme}://")
        raise ConfigError(f"{url}: {scheme}:// needs the package {package}; pip install {package}") from None
    except ValueError:
        raise ConfigError(
            f"{url}: {scheme}:// is not a scheme that fsspec knows; give s3://, gs://, https://"
        ) from None
    return store, str(path)


@contextmanager
def _looking(url: str, doing: str, error_class: type[MegatronError] = DataError) -> Iterator[tuple[Any, str]]:
    """The store of a URL without what it remembers, and the path in it. Turns whatever the store raises into one of our
    errors; each kind of store has its own classes."""
    store, path = _store(url)
    try:
        store.invalidate_cache()
        yield store, path
    except MegatronError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{url}: there is no such object; check the address") from None
    except Exception as error:
        raise error_class(f"{url}: {doing} failed ({_short(error)}); check the network and the access rights") from None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].rstrip(": ")


def status_of(url: str) -> RemoteStatus:
    with _looking(url, "looking at it") as (store, path):
        facts = store.info(path)
    if facts.get("type") == "directory":
        raise ConfigError(f"{url}: is a folder; name a file")
    if not isinstance(facts.get("size"), int):
        raise ConfigError(f"{url}: the server does not tell its size; download it first, and name the file")
    known = repr([facts[name] for name in _VERSIONS if facts.get(name) is not None])
    return RemoteStatus(facts["size"], hashlib.sha256(known.encode()).hexdigest()[:16])


def exists(url: str) -> bool:
    with _looking(url, "looking for it", StorageError) as (store, path):
        return bool(store.exists(path))


def is_folder(url: str) -> bool:
    if url.startswith(("http://", "https://")):
        return url.endswith("/")  # a request would fetch the file
    with _looking(url, "looking at it") as (store, path):
        return bool(store.isdir(path))


def has_magic(url: str) -> bool:
    return any(mark in url for mark in ("*[" if url.startswith("http") else "*?["))


def matches(pattern: str) -> list[str]:
    """The URLs of the files that match, sorted."""
    with _looking(pattern, "listing") as (store, path):
        found = store.glob(path, detail=True)
    return sorted(str(store.unstrip_protocol(name)) for name, facts in found.items() if facts["type"] == "file")


def files_in(url: str) -> list[str]:
    """The URLs of all files below a folder, sorted."""
    with _looking(url, "listing") as (store, path):
        return sorted(str(store.unstrip_protocol(name)) for name in store.find(path))


class RemoteFile(io.RawIOBase):
    """A seekable file that reads complete ranges."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0
        self._store, self._path = _store(url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        if count:
            buffer[:count] = self._fetch(self._position, self._position + count)
            self._position += count
        return count

    def _fetch(self, start: int, stop: int) -> bytes:
        for pause in (*PAUSES, None):
            try:
                data: bytes = self._store.cat_file(self._path, start=start, end=stop)
                if len(data) == stop - start:
                    return data
                reason = f"{len(data)} bytes came"
            except Exception as error:  # each kind of store raises its own classes
                reason = _short(error)
            if pause is not None:
                time.sleep(pause)
        raise DataError(
            f"{self._url}: reading bytes {start} to {stop} failed {len(PAUSES) + 1} times ({reason}); check the "
            "network and the object, or download it and name the file"
        )


def open_remote(url: str, size: int, buffering: int) -> io.BufferedReader:
    return io.BufferedReader(RemoteFile(url, size), max(buffering, 1 << 20))


def download(url: str, path: Path) -> None:
    """Fetches the object whole or not at all. One that changes meanwhile is refused."""
    try:
        write_atomically(path, _blocks(url), sync=False, temporary=path.with_name(f"{path.name}.download"))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror or error}); choose another folder") from None


def _blocks(url: str) -> Iterator[bytes]:
    status = status_of(url)
    with open_remote(url, status.size, 8 << 20) as source:
        while block := source.read(8 << 20):
            yield block
    if status_of(url) != status:
        raise DataError(f"{url}: was changed while it was read; run again when nobody writes it")


def upload(path: Path, url: str) -> None:
    with _looking(url, "writing", StorageError) as (store, name):
        if url.startswith("file://"):
            store.makedirs(store._parent(name), exist_ok=True)
        store.put_file(str(path), name)
        store.invalidate_cache()
        size = store.info(name)["size"]
    if size != path.stat().st_size:
        raise StorageError(f"{url}: {size} bytes are there, and {path.stat().st_size} were written; run again")


def remove(url: str) -> None:
    with _looking(url, "removing", StorageError) as (store, name):
        if store.exists(name):
            store.rm_file(name)

"""Files behind a URL (s3://, gs://, https://, file://, memory://, ...), through fsspec.

fsspec is imported when the first URL is met. Only whole answers count: a range that comes back shorter than it
was asked for is asked for again, and then is an error that names the URL; it never passes for the end of a file.
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

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
_VERSIONS = ("ETag", "etag", "VersionId", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
PAUSES = (0.5, 1.0, 2.0)  # seconds before a request is made again


def is_url(name: str | Path) -> bool:
    return isinstance(name, str) and _URL.match(name) is not None


@dataclass(frozen=True)
class RemoteStatus:
    size: int
    version: str  # the same version is the same content, as far as the store tells


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
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
def _reported(url: str, doing: str, error_class: type[MegatronError] = DataError) -> Iterator[None]:
    """Each kind of store raises classes of its own."""
    try:
        yield
    except MegatronError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{url}: there is no such object; check the address") from None
    except Exception as error:
        raise error_class(f"{url}: {doing} failed ({_short(error)}); check the network and the access rights") from None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].rstrip(": ")


def status_of(url: str) -> RemoteStatus:
    store, path = _store(url)
    with _reported(url, "looking at it"):
        store.invalidate_cache()
        facts = store.info(path)
    if facts.get("type") == "directory":
        raise ConfigError(f"{url}: is a folder; name a file")
    if not isinstance(facts.get("size"), int):
        raise ConfigError(f"{url}: the server does not tell its size; download it first, and name the file")
    known = repr([facts[name] for name in _VERSIONS if facts.get(name) is not None])
    return RemoteStatus(facts["size"], hashlib.sha256(known.encode()).hexdigest()[:16])


def exists(url: str) -> bool:
    store, path = _store(url)
    with _reported(url, "looking for it", StorageError):
        store.invalidate_cache()
        return bool(store.exists(path))


def is_folder(url: str) -> bool:
    store, path = _store(url)
    if url.startswith(("http://", "https://")):
        return url.endswith("/")  # asking would fetch the file
    with _reported(url, "looking at it"):
        store.invalidate_cache()
        return bool(store.isdir(path))


def has_magic(url: str) -> bool:
    return any(mark in url for mark in ("*[" if url.startswith("http") else "*?["))


def matches(pattern: str) -> list[str]:
    """URLs of files, by name."""
    store, path = _store(pattern)
    with _reported(pattern, "listing"):
        store.invalidate_cache()
        found = store.glob(path, detail=True)
    return sorted(str(store.unstrip_protocol(name)) for name, facts in found.items() if facts["type"] == "file")


def files_in(url: str) -> list[str]:
    """URLs of all files in a folder, however deep, by name."""
    store, path = _store(url)
    with _reported(url, "listing"):
        store.invalidate_cache()
        return sorted(str(store.unstrip_protocol(name)) for name in store.find(path))


class RemoteFile(io.RawIOBase):
    """Reads ranges, each of them whole."""

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
            except Exception as error:  # each kind of store raises classes of its own
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
    """Whole, or not there. An object that changes meanwhile is refused."""
    status = status_of(url)
    temporary = path.with_name(f"{path.name}.download")
    try:
        with open_remote(url, status.size, 8 << 20) as source, open(temporary, "wb") as target:
            while block := source.read(8 << 20):
                target.write(block)
        if status_of(url) != status:
            raise DataError(f"{url}: was changed while it was read; run again when nobody writes it")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror or error}); choose another folder") from None
    finally:
        temporary.unlink(missing_ok=True)


def upload(path: Path, url: str) -> None:
    store, name = _store(url)
    with _reported(url, "writing", StorageError):
        if url.startswith("file://"):
            store.makedirs(store._parent(name), exist_ok=True)
        store.put_file(str(path), name)
        store.invalidate_cache()
        size = store.info(name)["size"]
    if size != path.stat().st_size:
        raise StorageError(f"{url}: {size} bytes are there, and {path.stat().st_size} were written; run again")


def remove(url: str) -> None:
    store, name = _store(url)
    with _reported(url, "removing", StorageError):
        store.invalidate_cache()
        if store.exists(name):
            store.rm_file(name)

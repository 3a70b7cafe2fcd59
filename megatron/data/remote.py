"""Files behind a URL (s3://, gs://, https://, file://, memory://, ...), read and written through fsspec.

fsspec is imported at the first URL. Only schemes of stores are accepted. Other fsspec schemes (reference, zip, a chain
with ::) would read files that the object at the URL names. An incomplete range is requested again. After
the last attempt an error names the URL. A short read is never taken as the end of the file.
"""

import hashlib
import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError, MegatronError, StorageError, without_secrets
from megatron.utils.durable import write_atomically
from megatron.utils.ranged_file import RangedFile

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGES = {  # the package that reads each accepted scheme
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("file", "memory"), "fsspec"),
    "hf": "huggingface_hub",
    "hdfs": "pyarrow",
    "oss": "ossfs",
    "oci": "ocifs",
}
_OF_THE_HUB = re.compile(r"https://(?:huggingface\.co|hf\.co)/(datasets/|spaces/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
OLDEST_FSSPEC = "2025.3.0"
_VERSIONS = ("ETag", "etag", "VersionId", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
PAUSES = (0.5, 1.0, 2.0)  # seconds before each retry


def is_url(name: str | Path) -> bool:
    return isinstance(name, str) and _URL.match(name) is not None


def refuse_secrets(url: str) -> None:
    """Rejects a dataset's URL that contains secrets, because the URL without them would name other objects."""
    if without_secrets(url) != url:
        raise ConfigError(
            f"{url}: the address of a dataset contains a password or query; remove it (give credentials in the "
            "environment variables of the store's package)"
        )


@dataclass(frozen=True)
class RemoteStatus:
    size: int
    version: str  # equal versions mean equal content, as far as the store reports it


def _store(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it."""
    scheme = url.partition("://")[0]
    if "::" in url:
        raise ConfigError(
            f"{url}: chains two file systems (::), which is not supported; download the file, and give its path"
        )
    if scheme not in _PACKAGES:
        raise ConfigError(f"{url}: {scheme}:// is not supported; use {', '.join(_PACKAGES)}, or download it")
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{url}: reading URLs needs the package fsspec; pip install fsspec") from None
    if _numbers(fsspec.__version__) < _numbers(OLDEST_FSSPEC):
        raise ConfigError(
            f"{url}: fsspec {fsspec.__version__} is too old; pip install 'fsspec>={OLDEST_FSSPEC}'"
        ) from None
    options = {"get_client": _client_within_the_host} if scheme.startswith("http") else {}
    try:
        store, path = fsspec.core.url_to_fs(url, **options)
    except ImportError:
        package = _PACKAGES[scheme]
        raise ConfigError(f"{url}: {scheme}:// needs the package {package}; pip install {package}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: invalid address ({_short(error)}); correct it") from None
    return store, str(path)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


async def _client_within_the_host(**options: Any) -> Any:
    """Makes a web client that follows redirects only within the server, also from http to https. Otherwise an untrusted
    address could redirect to servers that only this machine can reach."""
    import aiohttp

    async def look(_session: Any, _context: Any, asked: Any) -> None:
        source, target = asked.url, asked.url.join(type(asked.url)(asked.response.headers.get("Location", "")))
        upgraded = (source.scheme, target.scheme) == ("http", "https")
        if source.host != target.host or not (upgraded or source.origin() == target.origin()):
            raise ConfigError(redirected(str(source), str(target.origin())))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(look)
    return aiohttp.ClientSession(trace_configs=[trace], **options)


def redirected(address: str, server: str) -> str:
    """Returns the error about a redirect to another server. The Hugging Face Hub's links redirect; hf:// does not."""
    found = _OF_THE_HUB.fullmatch(address.partition("?")[0])
    way_out = "download the file (curl -L), and give its path"
    if found is not None:
        kind, name, revision, path = found.groups()
        way_out = f"give hf://{kind or ''}{name}@{revision}/{path} (pip install huggingface_hub), or {way_out}"
    return f"{without_secrets(address)}: redirects to another server, {server}; {way_out}"


@contextmanager
def _looking(url: str, doing: str, error_class: type[MegatronError] = DataError) -> Iterator[tuple[Any, str]]:
    """Yields the file system of a URL, with its cache of listings cleared, and the path in it. Converts exceptions of
    any file system to MegatronError."""
    store, path = _store(url)
    try:
        store.invalidate_cache()
        yield store, path
    except MegatronError:
        raise
    except FileNotFoundError as error:
        if isinstance(error.__cause__, MegatronError):  # fsspec turns every web failure into FileNotFoundError
            raise error.__cause__ from None
        raise ConfigError(f"{url}: no such object; check the address") from None
    except Exception as error:
        raise error_class(f"{url}: {doing} failed ({_short(error)}); check the network and the access rights") from None


def _short(error: BaseException) -> str:
    return without_secrets(f"{type(error).__name__}: {' '.join(str(error).split())}")[:200].rstrip(": ")


def status_of(url: str) -> RemoteStatus:
    with _looking(url, "reading its size") as (store, path):
        facts = store.info(path)
    if facts.get("type") == "directory":
        raise ConfigError(f"{url}: is a folder; give a file")
    if not isinstance(facts.get("size"), int):
        raise ConfigError(f"{url}: the server does not report the file's size; download the file, and give its path")
    known = repr([facts[name] for name in _VERSIONS if facts.get(name) is not None])
    return RemoteStatus(facts["size"], hashlib.sha256(known.encode()).hexdigest()[:16])


def exists(url: str) -> bool:
    with _looking(url, "checking whether it exists", StorageError) as (store, path):
        return bool(store.exists(path))


def is_folder(url: str) -> bool:
    if url.startswith(("http://", "https://")):
        return url.endswith("/")  # a request would fetch the file
    with _looking(url, "checking whether it is a folder") as (store, path):
        return bool(store.isdir(path))


def has_magic(url: str) -> bool:
    return any(mark in url for mark in ("*[" if url.startswith("http") else "*?["))


def matches(pattern: str) -> list[str]:
    """Returns the URLs of the matching files, sorted."""
    with _looking(pattern, "listing") as (store, path):
        found = store.glob(path, detail=True)
    return sorted(str(store.unstrip_protocol(name)) for name, facts in found.items() if facts["type"] == "file")


def files_in(url: str) -> list[str]:
    """Returns the URLs of all files below a folder, sorted."""
    with _looking(url, "listing") as (store, path):
        return sorted(str(store.unstrip_protocol(name)) for name in store.find(path))


def open_remote(url: str, size: int, buffering: int) -> io.BufferedReader:
    """Opens an object as a stream that reads complete ranges."""
    store, path = _store(url)

    def fetch(start: int, stop: int) -> bytes:
        for pause in (*PAUSES, None):
            try:
                data: bytes = store.cat_file(path, start=start, end=stop)
                if len(data) == stop - start:
                    return data
                reason = f"got {len(data)} bytes"
            except MegatronError:
                raise
            except Exception as error:  # each store has its own exception classes
                reason = _short(error)
            if pause is not None:
                time.sleep(pause)
        raise DataError(
            f"{url}: reading bytes {start} to {stop} failed {len(PAUSES) + 1} times ({reason}); check the "
            "network and the object, or download it and give its path"
        )

    return io.BufferedReader(RangedFile(size, fetch), max(buffering, 1 << 20))


def download(url: str, path: Path) -> None:
    """Downloads an object atomically. Raises if the object changes during the download."""
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
        raise DataError(f"{url}: changed while it was read; run again when no process writes it")


def upload(path: Path, url: str) -> None:
    with _looking(url, "writing", StorageError) as (store, name):
        if url.startswith("file://"):
            store.makedirs(store._parent(name), exist_ok=True)
        store.put_file(str(path), name)
        store.invalidate_cache()
        size = store.info(name)["size"]
    if size != path.stat().st_size:
        raise StorageError(f"{url}: has {size} bytes, but {path.stat().st_size} were written; run again")


def remove(url: str) -> None:
    with _looking(url, "removing", StorageError) as (store, name):
        if store.exists(name):
            store.rm_file(name)

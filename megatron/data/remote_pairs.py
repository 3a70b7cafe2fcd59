"""Downloads datasets from URLs to a folder, and uploads complete ones."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.data import remote
from megatron.data.indexed.dataset import without_ending
from megatron.errors import ConfigError

_HALVES = (".bin", ".idx")
_RECORD = ".meta.json"


def fetch_words(words: Iterable[str], folder: Path) -> list[str]:
    """Downloads the datasets of each URL (prefix, pattern or folder). Returns local prefixes in place of the URLs."""
    local = []
    for word in words:
        local += [fetch_pair(prefix, folder) for prefix in _prefixes_of(word)] if remote.is_url(word) else [word]
    return local


def fetch_pair(prefix: str, folder: Path) -> str:
    """Downloads .bin, .idx and .meta.json (if any); returns the local prefix. Each URL folder has its own local
    folder."""
    remote.refuse_secrets(prefix)
    parent, _, name = prefix.rpartition("/")
    place = folder / hashlib.sha256(parent.encode()).hexdigest()[:8]
    place.mkdir(parents=True, exist_ok=True)
    for ending in _HALVES:
        remote.download(prefix + ending, place / (name + ending))
    if remote.exists(prefix + _RECORD):
        remote.download(prefix + _RECORD, place / (name + _RECORD))
    return str(place / name)


def _prefixes_of(word: str) -> list[str]:
    if remote.has_magic(word):
        names = remote.matches(word) + (remote.matches(f"{word}.idx") if not word.endswith(_HALVES) else [])
        way_out = "check the pattern"
    elif remote.is_folder(word):
        base = word.rstrip("/")
        names = [name for name in remote.files_in(word) if name.rpartition("/")[0] == base]
        way_out = "give the folder of the datasets"
    else:
        return [without_ending(word)]
    found = {without_ending(name) for name in names if name.endswith(_HALVES)}
    if not found:
        raise ConfigError(f"--input {word}: contains no .bin and .idx files; {way_out}")
    return sorted(found)


def refuse_existing_urls(prefix: str, outputs: Sequence[str]) -> None:
    """Rejects `outputs` (URLs without ending) that exist."""
    remote.refuse_secrets(prefix)
    for output in outputs:
        for ending in _HALVES:
            if remote.exists(output + ending):
                raise ConfigError(f"--output-prefix {prefix}: {output}{ending} exists; give --overwrite to replace it")


def beside(prefix: str, local: str) -> str:
    """Returns the URL of a local output: its name in the folder of `prefix`."""
    return f"{prefix.rpartition('/')[0]}/{Path(local).name}"


def put_pair(local: str, url: str) -> None:
    """Uploads a dataset and deletes the local files. An old record is removed first and the new one written last, so a
    record never describes other data."""
    for ending in (_RECORD, ".idx"):
        remote.remove(url + ending)
    endings = [ending for ending in (*_HALVES, _RECORD) if Path(local + ending).exists()]
    for ending in endings:
        remote.upload(Path(local + ending), url + ending)
    for ending in endings:
        Path(local + ending).unlink()

"""Parser of data blends from flags or files, shared by checks and datasets."""

import glob
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.split import Shares, parse_split
from megatron.errors import ConfigError, without_secrets
from megatron.utils.numerals import real_number
from megatron.utils.plain_text import is_plain_text, json_lines_command
from megatron.utils.regular_file import regular

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig

SPLITS = ("train", "valid", "test")
MAX_SOURCES = 2**15 - 1  # a blended index stores a source's number in 16 bits
_SHOWN = 8  # most arguments of a blend that a message shows


@dataclass(frozen=True)
class Blend:
    """Sources and their weights. Without weights, each source is used in proportion to its size."""

    flag: str  # the flag (and file) that gave the blend, for messages
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True)
class DataSources:
    """Blends of training, validation and test. If `cut`, all three use one blend, and `shares` divides it."""

    cut: bool
    blends: Sequence[Blend | None]
    shares: Shares  # of --split


def fetch_first(named: str, prefix: str) -> str:
    """Returns the error message for a source that is a URL."""
    name = without_secrets(prefix).rstrip("/").rpartition("/")[2]
    return (
        f"{named} {without_secrets(prefix)}: training reads only local files; copy it to each node first "
        f"(python tools/merge_datasets.py --input {without_secrets(prefix)} --output-prefix {name}) and give {name}"
    )


def parse_blend(flag: str, words: Sequence[str]) -> Blend:
    """Parses `PREFIX`, `WEIGHT PREFIX WEIGHT PREFIX ...`, or several prefixes without weights."""
    entries = [word.strip() for word in words]
    given = f"{flag} {' '.join(entries[:_SHOWN])}{' ...' if len(entries) > _SHOWN else ''}"
    way_out = f"give one PREFIX, several PREFIX, or WEIGHT PREFIX pairs, as in {flag.split()[0]} 0.3 web 0.7 code"
    if not entries or not all(entries):
        raise ConfigError(f"{given}: a path is empty; {way_out}")
    numbers = [_number(entry) for entry in entries]
    if len(entries) == 1 or all(number is None for number in numbers):
        prefixes, weights = tuple(entries), None
    else:
        if len(entries) % 2:
            raise ConfigError(f"{given}: {len(entries)} values, an odd number, cannot be pairs; {way_out}")
        prefixes, weights = tuple(entries[1::2]), _weights(given, entries, numbers[0::2], way_out)
    if len(prefixes) > MAX_SOURCES:
        raise ConfigError(
            f"{given}: {len(prefixes)} sources, above the limit of {MAX_SOURCES}; merge some with "
            "tools/merge_datasets.py"
        )
    return Blend(flag, prefixes, weights)


def _weights(given: str, entries: Sequence[str], numbers: Sequence[float | None], way_out: str) -> tuple[float, ...]:
    weights = []
    for word, prefix, weight in zip(entries[0::2], entries[1::2], numbers):
        if weight is None:
            raise ConfigError(f"{given}: {word!r}, before {prefix!r}, is not a number; {way_out}")
        if not 0 < weight < math.inf:
            raise ConfigError(f"{given}: the weight {word} of {prefix} is not a positive number; remove that source")
        weights.append(weight)
    return tuple(weights)


def _number(text: str) -> float | None:
    try:
        return real_number(text)
    except ValueError as error:
        return None if str(error) == "not a number" else math.nan


def data_sources(data: "DataConfig") -> DataSources:
    """Returns the blends of a run, from the flags or from the files that they name."""
    shares = parse_split(data.split)  # raises for an invalid --split, even if it has no effect
    if data.data_path is not None:
        blend = parse_blend("--data-path", data.data_path)
        return DataSources(True, [blend] * 3, shares)
    if data.data_args_path is not None:
        blend = _read_blend(data.data_args_path)
        return DataSources(True, [blend] * 3, shares)
    if data.per_split_data_args_path is not None:
        return DataSources(False, _read_per_split(data.per_split_data_args_path), shares)
    words = (data.train_data_path, data.valid_data_path, data.test_data_path)
    blends = [parse_blend(f"--{name}-data-path", given) if given else None for name, given in zip(SPLITS, words)]
    return DataSources(False, blends, shares)


def given_sets(data: "DataConfig") -> tuple[bool, bool, bool]:
    """Returns for training, validation and test: True if there is data. All True if a script supplies the data."""
    sources = data_sources(data)
    if data.mock_data or sources.cut:
        return (sources.shares[0] > 0, sources.shares[1] > 0, sources.shares[2] > 0)
    train, valid, test = (blend is not None for blend in sources.blends)
    return (train, valid, test) if train or valid or test else (True, True, True)


def _read_blend(path: str) -> Blend:
    """Reads a file with the value of --data-path, on any number of lines."""
    flag = f"--data-args-path {path}"
    words = _read(flag, path).split()
    if not words:
        raise ConfigError(f"{flag}: the file is empty; write the value of --data-path into it")
    return parse_blend(f"{flag}:", words)


def _read_per_split(path: str) -> list[Blend | None]:
    flag = f"--per-split-data-args-path {path}"
    way_out = 'write {"train": ["0.3", "web", "0.7", "code"], "valid": ["web_valid"]}'
    try:
        content = json.loads(_read(flag, path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: not JSON ({error}); {way_out}") from None
    if not isinstance(content, dict) or not content or not content.keys() <= set(SPLITS):
        raise ConfigError(f"{flag}: not an object whose keys are among {', '.join(SPLITS)}; {way_out}")
    blends: list[Blend | None] = []
    for name in SPLITS:
        words = content.get(name)
        if words is None:
            blends.append(None)
            continue
        if not isinstance(words, list) or not all(type(word) in (str, int, float) for word in words):
            raise ConfigError(f"{flag}: {name} is not a list of weights and prefixes; {way_out}")
        if invalid := [str(word) for word in words if not _is_text(str(word))]:
            raise ConfigError(f"{flag}: {name} has {invalid[0][:80]!r}, which cannot be a file's name; {way_out}")
        blends.append(parse_blend(f"{flag}: {name}", [str(word) for word in words]) if words else None)
    return blends


def _is_text(word: str) -> bool:
    """Returns False for null characters and lone surrogates, which are valid in JSON but not in file names."""
    try:
        return b"\0" not in word.encode()
    except UnicodeEncodeError:
        return False


def _read(flag: str, path: str) -> str:
    try:
        return regular(Path(path)).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{flag}: not UTF-8 text; give the file that lists the sources") from None
    except OSError as error:
        raise ConfigError(f"{flag}: cannot be read ({error.strerror}); check the path") from None


def prefix_meant(prefix: str) -> str:
    """Suggests a fix for a prefix without files: remove its suffix, use a similar name, or preprocess the text."""
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and path.with_suffix(".idx").exists():
        return f"give the prefix without its suffix: {path.with_suffix('')}"
    if found := datasets_of(path):
        return f"did you mean {found[0]}?"
    if path.is_file() and path.suffix not in (".bin", ".idx"):
        first, lines = json_lines_command(prefix) if is_plain_text(path) else ("", prefix)
        steps = f"{first} && python tools/preprocess_data.py" if first else "python tools/preprocess_data.py"
        return f"this is not a dataset; if it is text, convert it: {steps} --input {shlex.quote(lines)}"
    return "give the prefix that tools/preprocess_data.py wrote, without .bin or .idx"


def datasets_of(path: Path) -> list[Path]:
    """Prefixes of the datasets made from the text file `path` beside it, or made with `path` as --output-prefix."""
    name = path.stem if path.is_file() and path.suffix not in (".bin", ".idx") else path.name
    found = sorted(path.parent.glob(f"{glob.escape(name)}_*.idx")) if name and path.parent.is_dir() else []
    return [file.with_suffix("") for file in found]

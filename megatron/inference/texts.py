"""Reads texts for a model. Errors name the file and line."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import refuse_surrogates

BYTE_ORDER_MARK = "\ufeff"
"""Mark that some editors put before a text; it does not belong to the text."""


def read_nonempty_text(path: Path, *, flag: str) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror or error}); check the path") from None
    return decode_text(content, str(path))


def decode_text(content: bytes, name: str) -> str:
    if not content.strip():
        raise DataError(f"{name}: is empty; give text")
    try:
        return content.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: not UTF-8 (byte 0x{content[error.start]:02x} at {error.start}); convert it (iconv)"
        ) from None


def read_json_lines(path: Path, *, flag: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (place for messages, object) for every line that is not blank."""
    for number, line in enumerate(read_nonempty_text(path, flag=flag).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not JSON ({error}); each line must be one object") from None
        if not isinstance(entry, dict):
            raise DataError(f'{place}: a {type(entry).__name__}, not an object such as {{"text": "..."}}')
        yield place, entry


def text_under(entry: Mapping[str, Any], key: str, place: str, way_out: str = "give the key with --json-key") -> str:
    text = entry.get(key)
    if not isinstance(text, str):
        has = ", ".join(sorted(entry)[:8]) or "none"
        found = f"(its keys: {has})" if key not in entry else f"but {text!r:.40}"
        raise DataError(f"{place}: has no text under {key!r} {found}; {way_out}")
    check_text(text, place)
    return text


def check_text(text: str, place: str) -> None:
    try:
        refuse_surrogates(text)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None

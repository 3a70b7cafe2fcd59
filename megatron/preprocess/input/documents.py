"""Parses JSON lines into the texts of documents, or the reason why a line has none."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

# Numbers are not used. As floats they take constant memory for any number of digits, and Python's limit on the
# digits of an int does not make a valid line invalid.
_DECODER = json.JSONDecoder(parse_int=float)
# Replaces a line that is too long to keep. It is not UTF-8, so a real line equal to it is also bad.
TOO_LONG = b"\xff\xfe line too long"
_DEEP_BYTES = 1000  # shorter lines cannot be nested deeply enough for the two parsers to differ
_DEEP_MARKS = 400
_PLAIN_TEXT = 'the line begins with {!r}; is it plain text? Each line must be an object such as {{"text": "..."}}'

Texts = list[str]  # the sequences of one document; several if the value is a list of texts


@dataclass(frozen=True, slots=True)
class BadLine:
    """Reason why a line gives no document."""

    number: int
    kind: str  # for counting
    detail: str  # for the message

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


class LineError(Exception):
    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(slots=True)
class Batch:
    """About 1 MB of consecutive lines of a segment. An item of a JSON array or a row of a table counts as a line."""

    first_line: int  # within the segment, counted from 0
    lines: int  # blank and bad ones included
    size: int  # bytes consumed
    documents: list[tuple[int, list[Texts]]]  # the line within the segment, and the texts of each key
    blank: int
    bad: list[BadLine]  # numbers within the segment


def parse_lines(
    block: bytes, keys: Sequence[str], first: int = 0, loads: Callable[[bytes], Any] = orjson.loads
) -> Batch:
    """Parses whole lines; `first` is the number of the first one.

    Lines that `loads` rejects go to `parse_line`, which accepts more lines and gives equal texts for the others.
    """
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    batch = Batch(first, len(lines), len(block), [], 0, [])
    append = batch.documents.append
    key, one_key = keys[0], len(keys) == 1
    for number, line in enumerate(lines, start=first):
        try:
            record = loads(line)
            get = record.get
            if one_key and type(text := get(key)) is str:  # the loop below, for the most common case
                texts = [[text]]
            else:
                texts = [[text] if type(text := get(key)) is str else _texts_under(record, key) for key in keys]
            if len(line) > _DEEP_BYTES and _may_be_deep(line, record):
                _parse_into(batch, number, line, keys)
            else:
                append((number, texts))
        except (ValueError, AttributeError, LineError):
            _parse_into(batch, number, line, keys)
    return batch


def _texts_under(record: dict[str, Any], key: str) -> Texts:
    """Returns the texts under a key. `loads` has already rejected lone surrogates."""
    value = find_value(record, key)
    if type(value) is str:
        return [value]
    if type(value) is list and all(type(text) is str for text in value):
        return value
    raise LineError("not text")


def _may_be_deep(line: bytes, record: dict[str, object]) -> bool:
    """True if a line may be nested too deeply for one of the parsers. A cheap check, which is also True in doubt."""
    for value in record.values():
        if type(value) in (dict, list):
            return line.count(b"[") + line.count(b"{") > _DEEP_MARKS
    return False


def _parse_into(batch: Batch, number: int, line: bytes, keys: Sequence[str]) -> None:
    try:
        texts = parse_line(line, keys)
    except LineError as error:
        batch.bad.append(BadLine(number, error.kind, error.detail))
        return
    if texts is None:
        batch.blank += 1
    else:
        batch.documents.append((number, texts))


def parse_line(line: bytes, keys: Sequence[str]) -> list[Texts] | None:
    """Returns the texts under each key, or None for a blank line. The last of duplicate keys counts."""
    if line == TOO_LONG:
        raise LineError("line too long", "more than 1 GiB; the file is damaged, or not JSON lines")
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise LineError("not UTF-8", f"byte {error.start + 1} of the line: {error.reason}") from None
    if not text:
        return None
    try:
        record = _DECODER.decode(text)
    except RecursionError:
        raise LineError("not JSON", "nested too deeply") from None
    except ValueError as error:
        if text in ("{", "["):
            raise LineError(
                "not JSON", f"only {text}: not one object per line; convert the file with jq -c ."
            ) from None
        if text[0] not in '{["':
            raise LineError("not JSON", _PLAIN_TEXT.format(text[:20])) from None
        raise LineError("not JSON", f"{error}") from None
    if not isinstance(record, dict):
        raise LineError("not a JSON object", "each line must be one object, with the text under a key")
    return [texts_of(find_value(record, key), key) for key in keys]


def find_value(record: dict[str, Any], key: str) -> object:
    """Returns the value under the key or, if missing, under the dotted path through objects."""
    if key in record:
        return record[key]
    value: Any = record
    names = key.split(".")
    for i, name in enumerate(names):
        if type(value) is not dict or name not in value:
            raise missing_key(key, ".".join(names[:i]), list(value) if type(value) is dict else None)
        value = value[name]
    return value


def missing_key(key: str, inside: str, names: Sequence[str] | None, kind: str = "keys") -> LineError:
    if names is None:
        return LineError("key missing", f"no {key!r}: {inside!r} is not an object")
    present = ", ".join(repr(name)[:40] for name in names[:5]) or "none"
    return LineError("key missing", f"no {key!r} among the {kind}{f' of {inside!r}' if inside else ''}: {present}")


def texts_of(value: object, key: str) -> Texts:
    if type(value) is str:
        return [_checked(value, key)]
    if not isinstance(value, list):
        value = [value]
    texts: Texts = []
    for text in value:
        if not isinstance(text, str):
            raise LineError("not text", f"{key!r} holds {_json_kind(text)}")
        texts.append(_checked(text, key))
    return texts


def _checked(text: str, key: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            detail = f"{key!r} holds {code} at character {error.start}, half of a surrogate pair"
            raise LineError("lone surrogate", detail) from None
    return text


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return {float: "a number", dict: "an object", list: "a list in a list"}.get(type(value), type(value).__name__)

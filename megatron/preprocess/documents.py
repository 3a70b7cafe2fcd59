"""One line of JSON to the texts of one document, or the reason why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

# Numbers are never wanted here. As floats they cost constant memory however many digits they have, and the limit
# that Python sets on the digits of an int does not make a valid line invalid.
_DECODER = json.JSONDecoder(parse_int=float)

Texts = list[str]  # the sequences of one document: one, or several when the value is a list of texts


@dataclass(frozen=True, slots=True)
class BadLine:
    """Why a line gives no document."""

    number: int
    kind: str  # for counting
    detail: str  # for the reader

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


class LineError(Exception):
    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def parse_line(line: bytes | None, keys: Sequence[str]) -> list[Texts] | None:
    """The texts under each key; None for a blank line. Of a key that stands twice in a line the last counts."""
    if line is None:
        raise LineError("line too long", "more than 1 GiB; it is damaged, or not JSON lines")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError("not UTF-8", f"byte {error.start + 1} of the line: {error.reason}") from None
    if not text.strip():
        return None
    try:
        record = _DECODER.decode(text.strip())
    except RecursionError:
        raise LineError("not JSON", "nested too deeply") from None
    except ValueError as error:
        raise LineError("not JSON", f"{error}") from None
    if not isinstance(record, dict):
        raise LineError("not a JSON object", "each line is one object, with the text under a key")
    return [_texts_under(record, key) for key in keys]


def parse_block(
    block: bytes, keys: Sequence[str], first: int
) -> tuple[list[tuple[int, list[Texts]]], int, list[BadLine], int]:
    """Documents, blank lines, bad lines and the number of lines; `first` is the number of the first one."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    documents: list[tuple[int, list[Texts]]] = []
    bad: list[BadLine] = []
    blank = 0
    for number, line in enumerate(lines, start=first):
        try:
            texts = parse_line(line, keys)
        except LineError as error:
            bad.append(BadLine(number, error.kind, error.detail))
            continue
        if texts is None:
            blank += 1
        else:
            documents.append((number, texts))
    return documents, blank, bad, len(lines)


def _texts_under(record: dict[str, object], key: str) -> Texts:
    if key not in record:
        present = ", ".join(repr(name)[:40] for name in list(record)[:5]) or "none"
        raise LineError("key missing", f"no {key!r} among the keys: {present}")
    value = record[key]
    texts: Texts = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            raise LineError("not text", f"{key!r} holds {_json_kind(text)}")
        if not text.isascii():
            _refuse_surrogates(text, key)
        texts.append(text)
    return texts


def _refuse_surrogates(text: str, key: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise LineError("lone surrogate", f"{key!r} holds {code} at character {error.start}, half a pair") from None


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return {float: "a number", dict: "an object", list: "a list in a list"}.get(type(value), type(value).__name__)

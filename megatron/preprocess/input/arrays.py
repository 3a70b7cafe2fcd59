"""Splits a JSON array of objects into lines, one per item, holding at most one item in memory."""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import regex

from megatron.preprocess.input.documents import TOO_LONG

# `re` has a bug in possessive groups before Python 3.11.5; `regex` is correct but half as fast.
_compile: Callable[[bytes], Any] = re.compile if sys.version_info >= (3, 11, 5) else regex.compile
_STRUCTURE = re.compile(rb'["{}\[\],]')
# Inside an item only brackets matter: this pattern skips strings and commas up to the next bracket.
_TO_BRACKET = _compile(rb'(?s)[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+')
_BACKSLASH = ord("\\")
EMPTY_ITEM = b","  # makes an empty item a bad line; an empty line would be skipped as blank


class ArrayError(Exception):
    """Raised for a broken array structure, at item `item`."""

    def __init__(self, item: int, reason: str) -> None:
        super().__init__(item, reason)
        self.item, self.reason = item, reason


def array_lines(chunks: Iterator[bytes], max_line_bytes: int) -> Iterator[bytes]:
    """Yields chunks of whole lines. Only finds where items end; a later step checks that each item is JSON."""
    scanner = _Scanner(max_line_bytes)
    for chunk in chunks:
        lines = scanner.feed(chunk)
        if lines:
            yield lines
    scanner.finish()


class _Scanner:
    def __init__(self, max_line_bytes: int) -> None:
        self._max = max_line_bytes
        self._depth = 0  # 1 between the items
        self._in_string = False
        self._escaped = False  # the string continues in the next chunk, which begins with an escaped character
        self._item = 0  # the current item, counted from 1; 0 before the array
        self._ended = False
        self._parts: list[bytes] = []  # of the current item
        self._size = 0
        self._lines: list[bytes] = []

    def feed(self, chunk: bytes) -> bytes:
        """Returns the items that end in this chunk, one line each."""
        position = item_start = 0
        while position < len(chunk):
            if self._in_string:
                position = self._skip_string(chunk, position)
                continue
            if self._depth > 1 and (run := _TO_BRACKET.match(chunk, position)):
                position = run.end()
            match = _STRUCTURE.search(chunk, position)
            if match is None or self._ended:
                break
            position = match.end()
            item_start = self._structure(chunk, match.group(), item_start, position)
        if self._ended:
            if chunk[item_start:].strip():
                raise ArrayError(self._item, "the file continues after the end of its JSON array")
        elif self._item:
            self._keep(chunk[item_start:])
        lines, self._lines = b"".join(self._lines), []
        return lines

    def finish(self) -> None:
        if not self._ended:
            raise ArrayError(self._item, "the file ends inside its JSON array")

    def _structure(self, chunk: bytes, mark: bytes, item_start: int, position: int) -> int:
        """Handles a structural character; returns where the current item begins in the chunk."""
        if mark == b'"':
            self._in_string = True
        elif mark == b"{" or mark == b"[":
            self._depth += 1
            if self._depth == 1:
                self._item = 1
                return position
        elif mark == b",":
            if self._depth == 1:
                self._keep(chunk[item_start : position - 1])
                self._end_item(last=False)
                return position
        else:
            self._depth -= 1
            if self._depth == 0:
                self._keep(chunk[item_start : position - 1])
                self._end_item(last=True)
                self._ended = True
                return position
        return item_start

    def _skip_string(self, chunk: bytes, position: int) -> int:
        begin = position + self._escaped
        self._escaped = False
        quote = chunk.find(b'"', begin)
        end = quote if quote >= 0 else len(chunk)
        before = end
        while before > begin and chunk[before - 1] == _BACKSLASH:
            before -= 1
        escaped = (end - before) % 2 == 1
        if quote < 0:
            self._escaped = escaped
            return len(chunk)
        self._in_string = escaped
        return quote + 1

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._max:
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def _end_item(self, *, last: bool) -> None:
        if self._size > self._max:
            line = TOO_LONG
        else:
            # Between JSON tokens \n and \r are both white space; inside a string both are invalid.
            line = b"".join(self._parts).strip().replace(b"\n", b"\r")
        self._parts.clear()
        self._size = 0
        if last and not line and self._item == 1:
            return  # an empty array
        self._lines.append((line or EMPTY_ITEM) + b"\n")
        self._item += not last

"""Reads the instructions of a pickle without executing them."""

import io
import pickletools
from collections.abc import Iterator
from struct import Struct
from typing import IO, Any

Instruction = tuple[str, Any]
"""Opcode's name, and its argument or None."""

_KNOWN: dict[int, Any] = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_ALONE = {code: (opcode.name, None) for code, opcode in _KNOWN.items() if opcode.arg is None}
_SIGNED, _UNSIGNED = Struct("<i"), Struct("<I")
_OF_FOUR_BYTES = {ord(code): (_KNOWN[ord(code)].name, kind) for code, kind in zip("Jrj", (_SIGNED, *[_UNSIGNED] * 2))}
_OF_ONE_BYTE = {ord(code): _KNOWN[ord(code)].name for code in "Kqh"}
_TEXT, _STOP = ord("X"), ord(".")


class PickleRefused(ValueError):
    """Raised for a pickle that is malformed, or contains something that no checkpoint needs."""


def in_bytes(data: bytes) -> Iterator[Instruction]:
    """Yields the instructions of a pickle up to STOP. A malformed pickle raises an error of any type."""
    stream = io.BytesIO(data)
    position, code = 0, -1
    while code != _STOP:
        code, position = data[position], position + 1
        if (alone := _ALONE.get(code)) is not None:
            yield alone
        elif (name := _OF_ONE_BYTE.get(code)) is not None:
            yield name, data[position]
            position += 1
        elif (found := _OF_FOUR_BYTES.get(code)) is not None:
            yield found[0], found[1].unpack_from(data, position)[0]
            position += 4
        elif code == _TEXT:
            start = position + 4
            position = start + _UNSIGNED.unpack_from(data, position)[0]
            if position > len(data):
                raise ValueError("a text that is longer than the pickle")
            yield "BINUNICODE", str(data[start:position], "utf-8", "surrogatepass")
        else:
            opcode = _KNOWN[code]
            stream.seek(position)
            yield opcode.name, opcode.arg.reader(stream)
            position = stream.tell()


def in_stream(stream: IO[bytes]) -> Iterator[Instruction]:
    """Yields the instructions of the pickle at the stream's position, and leaves the stream after it."""
    for opcode, argument, _ in pickletools.genops(stream):
        yield opcode.name, argument

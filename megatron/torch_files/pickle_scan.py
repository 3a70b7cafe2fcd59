"""Reads the pickle of a `.pt` file without executing it, and refuses what no checkpoint needs.

`torch.load(weights_only=True)` calls no foreign code, but it calls `bytearray(10**10)`, and it builds values that
contain themselves, or the same list 2**60 times: whoever then walks or hashes them never ends. Here every opcode is
followed with the size of the values only, so that such a file is refused before anything is built.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import IO, Any

Instruction = tuple[str, Any]
"""(name, argument)"""

_KNOWN: dict[int, Any] = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_ALONE = {code: (opcode.name, None) for code, opcode in _KNOWN.items() if opcode.arg is None}
_SIGNED, _UNSIGNED = Struct("<i"), Struct("<I")
_OF_FOUR_BYTES = {ord(code): (_KNOWN[ord(code)].name, kind) for code, kind in zip("Jrj", (_SIGNED, *[_UNSIGNED] * 2))}
_OF_ONE_BYTE = {ord(code): _KNOWN[ord(code)].name for code in "Kqh"}
_TEXT, _STOP = ord("X"), ord(".")

_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_STORAGES = (
    *("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double", "ComplexFloat"),
    "ComplexDouble",
)
PLAIN = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.storage.UntypedStorage",
        "builtins.set",
        *(f"torch.{name}" for name in _DTYPES),
        *(f"torch.{name}Storage" for name in _STORAGES),
    }
)
"""The names that a file of tensors and plain values uses."""

_MAX_REPEATED = 1_000_000  # parts of values that occur more than once, such as the betas of all parameter groups
_MAX_DEPTH = 100  # whoever walks a value may call itself for every level
_MAX_INTEGER_BYTES = 64
_MAX_LONG_INTEGERS = 1000  # of more than 8 bytes: they can all have one hash, and a table of them takes quadratic time
_LEAVES = {
    *("NONE", "NEWFALSE", "NEWTRUE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING"),
    *("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"),
}
_POPPED = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "REDUCE": 2, "NEWOBJ": 2, "BINPERSID": 1}  # and one value pushed
_ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # popped, and put into the value below
_ADDED_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS"}


class PickleRefused(ValueError):
    """Says what a pickle contains that no checkpoint needs."""


def in_bytes(data: bytes) -> Iterator[Instruction]:
    """Ends after STOP; what is malformed is an error of some kind."""
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
    """Of the pickle that begins at the stream's position, which then stands after it."""
    for opcode, argument, _ in pickletools.genops(stream):
        yield opcode.name, argument


@dataclass(slots=True)
class _Value:
    parts: int = 1  # as many as a walk over it visits
    depth: int = 1
    finished: bool = False  # it was referred to again; whoever changes it now makes a cycle, or grows many at once


def scan(data: bytes, allowed: Collection[str]) -> None:
    """Raises PickleRefused unless the pickle consists of plain values, PLAIN names and the `allowed` names."""
    try:
        _follow(data, allowed)
    except PickleRefused:
        raise
    except Exception as error:  # pickletools raises many kinds
        raise PickleRefused(f"its pickle is malformed ({type(error).__name__}: {str(error)[:100]})") from error


def _follow(data: bytes, allowed: Collection[str]) -> None:
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[int, _Value] = {}
    repeated = long_integers = 0
    for name, argument in in_bytes(data):
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            stack[-1].finished = True
            repeated += stack[-1].parts
            if repeated > _MAX_REPEATED:
                raise PickleRefused("it repeats values within values more than a million times")
        elif name in _LEAVES:
            if name == "LONG1" and argument.bit_length() > 64:
                long_integers += 1
                if argument.bit_length() > 8 * _MAX_INTEGER_BYTES or long_integers > _MAX_LONG_INTEGERS:
                    raise PickleRefused(f"it has an integer of more than {_MAX_INTEGER_BYTES} bytes, or many long ones")
            stack.append(_Value())
        elif name == "GLOBAL":
            _check_name(argument, allowed)
            stack.append(_Value())
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _POPPED:
            stack.append(_holding(_pop(stack, _POPPED[name])))
        elif name == "TUPLE":
            stack.append(_holding(_pop(stack, len(stack) - marks.pop())))
        elif name in _ADDED:
            _put_into(stack, _pop(stack, _ADDED[name]))
        elif name in _ADDED_TO_MARK:
            _put_into(stack, _pop(stack, len(stack) - marks.pop()))
        elif name not in ("PROTO", "STOP"):
            raise PickleRefused(f"it has the pickle instruction {name}, which torch does not write")


def _check_name(argument: str, allowed: Collection[str]) -> None:
    module, _, name = argument.partition(" ")
    full = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if full not in PLAIN and full not in allowed:
        raise PickleRefused(f"it asks for {full}")


def _pop(stack: list[_Value], count: int) -> list[_Value]:
    if not 0 <= count <= len(stack):
        raise PickleRefused("its pickle is malformed (a value is missing)")
    popped = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return popped


def _holding(values: list[_Value]) -> _Value:
    holder = _Value()
    _add(holder, values)
    return holder


def _put_into(stack: list[_Value], values: list[_Value]) -> None:
    if stack[-1].finished:
        raise PickleRefused("it has a value that contains itself, or that changes after its use")
    _add(stack[-1], values)


def _add(holder: _Value, values: list[_Value]) -> None:
    holder.parts += sum(value.parts for value in values)
    holder.depth = max([holder.depth, *(value.depth + 1 for value in values)])
    if holder.depth > _MAX_DEPTH:
        raise PickleRefused(f"it nests values more than {_MAX_DEPTH} deep")

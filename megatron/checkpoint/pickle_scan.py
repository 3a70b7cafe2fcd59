"""Reads the pickle of a `.pt` file without executing it, and refuses what no checkpoint needs.

`torch.load(weights_only=True)` calls no foreign code, but it calls `bytearray(10**10)`, and it builds values that
contain themselves, or the same list 2**60 times: whoever then walks or hashes them never ends. Here every opcode is
followed with the size of the values only, so that such a file is refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron.checkpoint.pickle_opcodes import in_bytes

_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128"),
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
_MAX_INTEGER_BYTES = 8  # longer ones can all have one hash, and a table of them takes quadratic time
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
    repeated = 0
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
            if name == "LONG1" and argument.bit_length() > 8 * _MAX_INTEGER_BYTES:
                raise PickleRefused(f"it has an integer of more than {_MAX_INTEGER_BYTES} bytes")
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

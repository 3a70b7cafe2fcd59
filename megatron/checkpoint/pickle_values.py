"""What a pickle is read as (`pickle_reader.py`): plain values, and descriptions of all else.

A name (`GLOBAL`) becomes a `Name`, an object that the pickle asks to be made becomes a `Made` with what it was to be
made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.pickle_scan import PickleRefused

_MAX_KEY_BITS = 64  # longer integers can all have one hash


@dataclass(frozen=True)
class Name:
    """A class, function or other object of a module, which was not looked up."""

    text: str

    @property
    def last(self) -> str:
        return self.text.rpartition(".")[2]


@dataclass(eq=False, slots=True)
class Made:
    """What an object would have been made from."""

    kind: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] | list[Any] | None = None


@dataclass(eq=False, slots=True)
class Persistent:
    """What is not in the pickle but beside it: torch's storages."""

    identity: Any


def container(value: Any, kind: type[dict[Any, Any]] | type[list[Any]]) -> Any:
    """What elements are put into: of an object, those of its own."""
    if not isinstance(value, Made):
        return value
    if value.items is None:
        value.items = kind()
    return value.items


def made(kind: Any, arguments: Any) -> Any:
    """A few kinds of plain content are given as such."""
    if not isinstance(arguments, tuple):
        raise PickleRefused("its pickle is malformed (a call without arguments)")
    if not isinstance(kind, Name):
        return Made(Name("(what another call gives)"), (kind, *arguments))
    if kind.text == "collections.OrderedDict" and not arguments:
        return {}
    if kind.text == "torch.Size" and len(arguments) == 1 and isinstance(arguments[0], tuple):
        return arguments[0]
    if kind.text == "_codecs.encode" and len(arguments) == 2 and isinstance(arguments[0], str):
        return arguments[0].encode("latin-1")  # how bytes are written by protocol 2
    if kind.text == "copyreg._reconstructor" and arguments and isinstance(arguments[0], Name):
        return Made(arguments[0])
    return Made(kind, arguments)


def check_key(key: Any) -> None:
    """Refuses keys whose hash is slow, or the same for many of them."""
    if isinstance(key, (tuple, frozenset)):
        for part in key:
            check_key(part)
    elif isinstance(key, int):
        if key.bit_length() > _MAX_KEY_BITS:
            raise PickleRefused("it has a key that is a very long integer")
    elif key is not None and not isinstance(key, (str, bytes, float, Name, Made)):
        raise PickleRefused(f"it has a key that is a {type(key).__name__}")

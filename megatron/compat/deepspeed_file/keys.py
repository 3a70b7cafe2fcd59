"""Descriptions of keys of DeepSpeed's JSON: the type of a value, and the setting, notice or error it becomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["switch", "whole", "number", "text", "list", "block"]

KINDS: Mapping[Kind, str] = {
    "switch": "true or false",
    "whole": "a whole number",
    "number": "a number",
    "text": "text",
    "list": "a list",
    "block": "a block of keys",
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """Row of the table. A key sets a field, has no effect (with a notice), is rejected, or is decided with its block.

    A block that has only one row (members.py lists its keys) has no effect while its `enabled` is false.
    """

    path: str  # with dots; a row that is given to within() or block() may name several keys
    kind: Kind
    field: str = ""  # sets: the field of RunConfig
    becomes: Callable[[Any], Any] | None = None  # sets: the field's value from the key's; a ValueError refuses it
    line: str = ""  # no effect: why
    way_out: str = ""  # refused: what to do instead
    neutral: tuple[Any, ...] = ()  # refused: values that are accepted, as no-ops
    meaning: str = ""  # for the page: what the value means, or what decides about it

    @property
    def has_rows(self) -> bool:
        """True for a block whose keys have rows of their own."""
        return self.kind == "block" and not self.line and not self.way_out


def within(path: str, *keys: Key) -> tuple[Key, ...]:
    """Returns the rows of a block's keys, one for each name, with the block's path before it."""
    return tuple(replace(key, path=f"{path}.{name}") for key in keys for name in key.path.split())


def block(path: str, *keys: Key) -> tuple[Key, ...]:
    """Returns the row of a block, and the rows of its keys."""
    return (Key(path=path, kind="block"), *within(path, *keys))


def sets(path: str, kind: Kind, field: str, meaning: str = "", becomes: Callable[[Any], Any] | None = None) -> Key:
    return Key(path=path, kind=kind, field=field, becomes=becomes, meaning=meaning)


def decided(path: str, kind: Kind, meaning: str) -> Key:
    return Key(path=path, kind=kind, meaning=meaning)


def no_effect(path: str, kind: Kind, line: str) -> Key:
    return Key(path=path, kind=kind, line=line)


def refused(path: str, kind: Kind, way_out: str, *neutral: Any) -> Key:
    return Key(path=path, kind=kind, way_out=way_out, neutral=neutral)


def wrong_kind(kind: Kind, value: Any) -> str | None:
    """Describes what is wrong with the type of a value; None if nothing is."""
    if kind == "switch":
        right = isinstance(value, bool)
    elif kind in ("whole", "number"):
        right = isinstance(value, int | float) and not isinstance(value, bool)
    elif kind == "block":
        right = isinstance(value, Mapping)
    else:
        right = isinstance(value, str if kind == "text" else list | tuple)
    if not right:
        return f"not {KINDS[kind]}"
    if isinstance(value, float):
        if value - value != 0.0:  # infinity or NaN
            return "not a finite number"
        if kind == "whole" and value != int(value):
            return "not a whole number"
    if isinstance(value, str) and not value.isprintable():
        return "not printable text"
    return None

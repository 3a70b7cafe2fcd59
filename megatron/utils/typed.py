"""Plain JSON content as typed values: each is of the type that is declared for it, or an error names the place."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def typed(kind: type[T], value: Any) -> T:
    """The value of type `kind` (say, a dataclass) that `value` describes; a ValueError says what is wrong, where."""
    made: T = _read(kind, value, kind.__name__.lower() if isinstance(kind, type) else "value")
    return made


def plain(value: Any) -> Any:
    """What `typed` reads back: dataclasses as objects, tuples as lists, paths as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"the names of an object are text, not {sorted({type(name).__name__ for name in value})}")
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _read(kind: Any, value: Any, place: str) -> Any:
    if kind is Any:
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # of a type and None: there are no others
        return None if value is None else _read(next(one for one in inner if one is not type(None)), value, place)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, place)
    if origin is tuple:
        return _read_tuple(inner, value, place)
    if origin is list:
        _demand(isinstance(value, list), value, "a list", place)
        return [_read(inner[0], item, place) for item in value]
    if origin in (Mapping, dict):
        _demand(isinstance(value, dict), value, "an object", place)
        return {name: _read(inner[1], item, f"{place}.{name}"[:200]) for name, item in value.items()}
    if kind is Path:
        _demand(isinstance(value, str), value, "text", place)
        return Path(value)
    _demand(type(value) is kind or (kind is float and type(value) is int), value, kind.__name__, place)
    return value


def _read_fields(kind: Any, value: Any, place: str) -> Any:
    _demand(isinstance(value, dict), value, "an object", place)
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in value and not optional:
            raise ValueError(f"{place}.{name} is missing")
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"{place}.{unknown[0][:100]} is not known")
    return kind(**{name: _read(hints[name], item, f"{place}.{name}") for name, item in value.items()})


def _read_tuple(inner: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    _demand(isinstance(value, list), value, "a list", place)
    if inner[-1] is Ellipsis:
        return tuple(_read(inner[0], item, place) for item in value)
    _demand(len(value) == len(inner), value, f"a list of {len(inner)}", place)
    return tuple(_read(one, item, place) for one, item in zip(inner, value, strict=True))


def _demand(holds: bool, value: Any, wanted: str, place: str) -> None:
    if not holds:
        raise ValueError(f"{place} is {type(value).__name__}, not {wanted}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)

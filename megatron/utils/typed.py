"""Plain JSON content as dataclasses: each value is of the type that its field declares, or an error names the place."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def typed(kind: type[T], value: Any) -> T:
    """The dataclass of type `kind` that `value` describes; a ValueError says what is wrong, and where."""
    made: T = _read(kind, value, kind.__name__.lower())
    return made


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
    if origin is Mapping:
        _demand(isinstance(value, dict), value, "an object", place)
        return {name: _read(inner[1], item, f"{place}.{name}"[:200]) for name, item in value.items()}
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

"""Converts plain JSON values to values of declared types; an error names the place of a wrong one."""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Read = Callable[[Any, str], Any]
"""Function of a value and the name of its place, which returns the typed value."""


def typed(kind: type[T], value: Any) -> T:
    """Converts `value` to `kind`, such as a dataclass. A ValueError names the problem and its place."""
    wanted: Any = kind
    made: T = _reader(wanted)(value, kind.__name__.lower() if isinstance(kind, type) else "value")
    return made


def json_value(value: Any) -> Any:
    """Converts to JSON values that `typed` reads back: dataclasses to objects, tuples to lists, paths to text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"the names of an object are text, not {sorted({type(name).__name__ for name in value})}")
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@cache
def _reader(kind: Any) -> Read:
    """Returns the function that reads values of this type. Cached, because a manifest has thousands of them."""
    if kind is Any:
        return lambda value, place: value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # no field has a union other than of one type and None
        some = _reader(next(one for one in inner if one is not type(None)))
        return lambda value, place: None if value is None else some(value, place)
    if dataclasses.is_dataclass(kind):
        return _reader_of_fields(kind)
    if origin is tuple:
        return _reader_of_tuple(inner)
    if origin is list:
        return _reader_of_list(_reader(inner[0]))
    if origin in (Mapping, dict):
        return _reader_of_mapping(_reader(inner[1]))
    if kind is Path:
        return _read_path
    return _reader_of_plain(kind)


def _reader_of_plain(kind: type) -> Read:
    def read(value: Any, place: str) -> Any:
        if type(value) is not kind:
            _demand(kind is float and type(value) is int, value, kind.__name__, place)
        return value

    return read


def _read_path(value: Any, place: str) -> Path:
    _demand(isinstance(value, str), value, "text", place)
    return Path(value)


def _reader_of_list(item: Read) -> Read:
    def read(value: Any, place: str) -> list[Any]:
        _demand(isinstance(value, list), value, "a list", place)
        return [item(each, place) for each in value]

    return read


def _reader_of_mapping(item: Read) -> Read:
    def read(value: Any, place: str) -> dict[Any, Any]:
        _demand(isinstance(value, dict), value, "an object", place)
        return {name: item(each, f"{place}.{name}"[:200]) for name, each in value.items()}

    return read


def _reader_of_fields(kind: Any) -> Read:
    readers = {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}
    fields = {field.name for field in dataclasses.fields(kind)}
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [field.name for field in dataclasses.fields(kind) if (field.default, field.default_factory) == missing]

    def read(value: Any, place: str) -> Any:
        _demand(isinstance(value, dict), value, "an object", place)
        for name in needed:
            if name not in value:
                raise ValueError(f"{place}.{name} is missing")
        if unknown := sorted(value.keys() - fields):
            raise ValueError(f"{place}.{unknown[0][:100]} is not known")
        return kind(**{name: readers[name](item, f"{place}.{name}") for name, item in value.items()})

    return read


def _reader_of_tuple(inner: tuple[Any, ...]) -> Read:
    if inner[-1] is Ellipsis:
        listed = _reader_of_list(_reader(inner[0]))
        return lambda value, place: tuple(listed(value, place))
    readers = [_reader(one) for one in inner]

    def read(value: Any, place: str) -> tuple[Any, ...]:
        _demand(isinstance(value, list), value, "a list", place)
        _demand(len(value) == len(readers), value, f"a list of {len(readers)}", place)
        return tuple([one(item, place) for one, item in zip(readers, value, strict=True)])

    return read


def _demand(holds: bool, value: Any, wanted: str, place: str) -> None:
    if not holds:
        raise ValueError(f"{place} is {type(value).__name__}, not {wanted}")

"""Encodes a user's values in a checkpoint as types that the weights-only loader accepts, and decodes them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import ConfigError

_PAIRS, _TUPLE = "pairs of a dict", "items of a tuple"
# Stricter than the limits of reading (torch_files/pickle_scan.py).
_DEEPEST, _LONGEST, _MOST = 80, 500, 900  # levels, bits of an integer, integers of more than 64 bits


def mark_types(value: Any, place: str) -> Any:
    """Encodes `value`. Marks tuples, and dicts with keys that are not text. Rejects what a file cannot hold, and names
    its place."""
    try:
        encoded = _encoded(value, place)
        if _depth(encoded) > _DEEPEST:
            raise RecursionError
        if (count := _long_integers(encoded)) > _MOST:
            raise ConfigError(
                f"{place}: has {count} integers of over 64 bits; give text, as in str(...), or at most {_MOST}"
            )
        return encoded
    except RecursionError:
        raise ConfigError(
            f"{place}: contains itself, or is nested more than {_DEEPEST} deep; give plain values"
        ) from None


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, _within(value)), default=0)


def _long_integers(value: Any) -> int:
    return int(isinstance(value, int) and value.bit_length() > 64) + sum(map(_long_integers, _within(value)))


def _encoded(value: Any, place: str) -> Any:
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        raise ConfigError(
            f"{place}: is an integer of {value.bit_length()} bits, more than {_LONGEST}; give text, as in str(...)"
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not {_PAIRS, _TUPLE} & set(value):
            return {key: _encoded(item, f"{place}.{key}") for key, item in value.items()}
        return {_PAIRS: [[_encoded(key, place), _encoded(item, f"{place}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(item, f"{place}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encoded(item, f"{place}[{number}]") for number, item in enumerate(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return value.item() if value.ndim == 0 else torch.from_numpy(value.copy())
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(
        f"{place}: is a {type(value).__name__}, but a checkpoint holds only tensors, numbers, text, lists and dicts, "
        "so that loading it runs no code; convert it to one of these"
    )


def restore_types(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _PAIRS in value:
            return {_hashable(restore_types(key)): restore_types(item) for key, item in value[_PAIRS]}
        if _TUPLE in value:
            return tuple(restore_types(item) for item in value[_TUPLE])
        return {key: restore_types(item) for key, item in value.items()}
    return [restore_types(item) for item in value] if isinstance(value, list) else value


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key

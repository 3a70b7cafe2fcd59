"""Parses text or YAML into the value of one setting, or raises a one-line ConfigError."""

import difflib
import math
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.config.flag import Setting
from megatron.errors import ConfigError
from megatron.utils.numerals import LARGEST, real_number, whole_number

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SHOWN_BITS = 512  # Python refuses to write thousands of digits
_KIND = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def show(value: Any) -> str:
    """Returns a value as a user would type it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(show(item) for item in value)
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"{hex(value)[:20]}..."
    return "none" if value is None else str(value)


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Returns " (did you mean X?)" for a candidate that begins with the word or resembles it, or ""."""
    listed = list(candidates)
    longer = [candidate for candidate in listed if word and candidate.startswith(word)]
    close = longer[:1] or difflib.get_close_matches(word, listed, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def parse_switch(setting: Setting, raw: Any) -> bool:
    """Returns the boolean as written. For `--no-X` the caller inverts it."""
    if isinstance(raw, bool):
        return raw
    text = str(raw).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(
        f"{setting.spelling} {show(raw)}: a switch is true or false; give only {setting.spelling}, or "
        f"{setting.spelling}=false"
    )


def _parse_one(setting: Setting, raw: Any) -> int | float | str:
    spelled = f"{setting.spelling} {show(raw)}"
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        raise ConfigError(
            f"{setting.spelling} '': the value is empty (an unset shell variable?); give a value or remove the flag"
        )
    if isinstance(raw, dict | list | tuple | set | bytes):
        raise ConfigError(f"{setting.spelling}: the value is a {type(raw).__name__}; give {_KIND[setting.base]}")
    if setting.base is str:
        return show(raw) if isinstance(raw, int) and not isinstance(raw, bool) else str(raw)
    try:
        return _whole(raw) if setting.base is int else _real(raw)
    except ValueError as error:
        raise ConfigError(f"{spelled}: {error}; {_way_out(setting)}") from None


def _whole(raw: Any) -> int:
    if isinstance(raw, str):
        return whole_number(raw)
    if isinstance(raw, bool) or raw != raw or not isinstance(raw, int | float):
        raise ValueError("not a whole number")
    if abs(raw) > LARGEST:
        raise ValueError("out of range")
    if raw != int(raw):
        raise ValueError("not a whole number")
    return int(raw)


def _real(raw: Any) -> float:
    if isinstance(raw, str):
        return real_number(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise ValueError("not a number")
    try:
        number = float(raw)
    except OverflowError:
        raise ValueError("out of range of a 64-bit number") from None
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _way_out(setting: Setting) -> str:
    flag = setting.flag
    if flag.choices:
        return "choose from " + ", ".join(show(choice) for choice in flag.choices)
    bounds = {"of at least": flag.at_least, "above": flag.above, "of at most": setting.largest, "below": flag.below}
    shown = {
        word: str(bound) if isinstance(bound, int) else f"{bound:g}"
        for word, bound in bounds.items()
        if bound is not None
    }
    limits = " and ".join(f"{word} {bound}" for word, bound in shown.items())
    return f"give {_KIND[setting.base]} {limits}".rstrip()


def check_one(setting: Setting, value: Any) -> None:
    """Checks the choices and bounds of a single value."""
    flag, spelled = setting.flag, f"{setting.spelling} {show(value)}"
    if flag.refused and value in flag.refused:
        raise ConfigError(f"{spelled}: {flag.refused[value]}")
    if flag.choices and value not in flag.choices:
        hint = nearest(str(value), [str(choice) for choice in flag.choices])
        raise ConfigError(f"{spelled}: no such choice{hint}; {_way_out(setting)}")
    largest = setting.largest
    too_small = (flag.at_least is not None and value < flag.at_least) or (
        flag.above is not None and value <= flag.above
    )
    too_large = (largest is not None and value > largest) or (flag.below is not None and value >= flag.below)
    if too_small or too_large:
        raise ConfigError(f"{spelled}: out of range; {_way_out(setting)}")


def _split_tuple(raw: Any) -> Sequence[Any]:
    """Returns a list of words or a YAML list as a sequence; a scalar becomes a sequence of one."""
    return list(raw) if isinstance(raw, list | tuple) else [raw]


def _numbers(parts: Sequence[Any]) -> Sequence[Any]:
    """Splits numbers written as "1,2", "(1,2)" or "[1, 2]", which some of Megatron's scripts do."""
    words: list[Any] = []
    for part in parts:
        words += part.strip("()[] ").replace(",", " ").split() if isinstance(part, str) else [part]
    return words


def parse_value(setting: Setting, raw: Any) -> Any:
    """Returns the checked value of a setting that is not a switch. `raw`: a word, a list of words or a YAML value."""
    if not setting.many:
        parts = _split_tuple(raw)
        if len(parts) != 1:
            raise ConfigError(f"{setting.spelling} {show(raw)}: takes one value, not {len(parts)}")
        value = _parse_one(setting, parts[0])
        value = (setting.flag.also or {}).get(str(value), value)
        check_one(setting, value)
        return value
    parts = shlex.split(raw) if isinstance(raw, str) else _split_tuple(raw)  # a YAML scalar reads like a command line
    values = tuple(_parse_one(setting, part) for part in (parts if setting.base is str else _numbers(parts)))
    wanted = setting.flag.nargs
    if not values or (isinstance(wanted, int) and len(values) != wanted):
        raise ConfigError(f"{setting.spelling} {show(raw)}: give {wanted if wanted != '+' else 'one or more'} values")
    for value in values:
        check_one(setting, value)
    return values

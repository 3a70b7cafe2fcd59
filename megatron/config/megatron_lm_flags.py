"""Compatibility with Megatron-LM's command lines: flags of its scripts that are not settings of a section.

A retired spelling sets the field that replaced it, a no-op prints one line, and every other flag raises an error with
the fix. `docs/flags_of_others.md` lists them all. When a feature is built, its flags move from here into a section.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from megatron.config import megatron_deepspeed_flags, megatron_lm_flag_table
from megatron.config.flag import Status
from megatron.errors import ConfigError
from megatron.utils.numerals import real_number

Takes = Literal["switch", "value", "values"]
_TABLES = (megatron_lm_flag_table, megatron_deepspeed_flags)


@dataclass(frozen=True, kw_only=True)
class CompatFlag:
    """A known flag that is not a field: accepted as a no-op, or rejected with a reason."""

    spelling: str
    status: Status
    note: str
    takes: Takes
    neutral: str | None = None  # the value that is accepted without a notice
    accepts: tuple[str, ...] = ()  # no-op: the accepted values; others are rejected


@dataclass(frozen=True, kw_only=True)
class RetiredFlag:
    """An old spelling and the fields that it sets, with their values. None stands for the value that the user gave."""

    spelling: str
    takes: Takes
    note: str
    values: Mapping[str, Any]


@cache
def retired_flags() -> Mapping[str, RetiredFlag]:
    rows: dict[str, RetiredFlag] = {}
    for word, (note, values) in chain.from_iterable(table.RETIRED.items() for table in _TABLES):
        spelling, takes, _ = _parse(word)
        rows[spelling] = RetiredFlag(spelling=spelling, takes=takes, note=note, values=values)
    return MappingProxyType(rows)


def _parse(word: str) -> tuple[str, Takes, str]:
    """Splits an entry of the table into (spelling, kind of value, text after the =)."""
    spelling, equals, value = word.partition("=")
    takes: Takes = "values" if value == "..." else "value" if equals else "switch"
    return spelling, takes, value.removeprefix("...")


@cache
def compat_flags() -> Mapping[str, CompatFlag]:
    rows = [row for table in _TABLES for row in _rows_of(table)]
    by_spelling = {row.spelling: row for row in rows}
    assert len(by_spelling) == len(rows), "a flag is in both tables"
    return MappingProxyType(by_spelling)


def _rows_of(table: ModuleType) -> Iterator[CompatFlag]:
    groups: tuple[tuple[Status, dict[str, str]], ...] = (
        ("later", table.LATER),
        ("never", table.NEVER),
        ("no-op", table.NO_OPS),
    )
    for status, words_by_note in groups:
        for note, words in words_by_note.items():
            for spelling, takes, value in map(_parse, words.split()):
                accepts = tuple(value.split("|")) if "|" in value else ()
                neutral = None if accepts else value or None
                yield CompatFlag(
                    spelling=spelling, status=status, note=note, takes=takes, neutral=neutral, accepts=accepts
                )


def refused_family(spelling: str) -> str | None:
    """Returns the error for an unsupported family of flags (RETRO, vision, ...), found by prefix; None for others."""
    return next((note for prefix, note in megatron_lm_flag_table.FAMILIES.items() if spelling.startswith(prefix)), None)


def apply_compat(flag: CompatFlag, text: str) -> str | None:
    """Returns the notice of a no-op, or None for a neutral value. Raises a ConfigError for other flags and values."""
    if flag.neutral is not None and _same(text, flag.neutral):
        return None
    spelled = f"{flag.spelling} {text}".rstrip()
    if flag.status == "no-op":
        if flag.accepts and text not in flag.accepts:
            raise ConfigError(f"{spelled}: not supported; use {' or '.join(flag.accepts)}, or remove the flag")
        return f"{spelled}: {flag.note}"
    verdict = "not supported yet" if flag.status == "later" else "not supported"
    raise ConfigError(f"{spelled}: {verdict}; {flag.note.replace('VALUE', text)}")


def _same(text: str, neutral: str) -> bool:
    try:
        return real_number(text) == real_number(neutral)  # 0 and 0.0 are equal
    except ValueError:
        return text == neutral

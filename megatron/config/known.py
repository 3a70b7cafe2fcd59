"""Flags that Megatron's scripts pass and that are no field of ours: what each means here.

Retired spellings set the field that took their place; named no-ops print their line; the rest is refused by name.
`docs/flags.md` lists them all. A new capability moves its flags from here into a section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from megatron.config import known_names as names
from megatron.config.flag import Status
from megatron.errors import ConfigError

Takes = Literal["switch", "value", "values"]


@dataclass(frozen=True, kw_only=True)
class KnownFlag:
    """A flag that is accepted or refused by name without being a field."""

    spelling: str
    status: Status
    note: str
    takes: Takes
    neutral: str | None = None  # later/never: the value that asks for nothing new
    accepts: tuple[str, ...] = ()  # no-op: the values that mean nothing here; others are refused


@dataclass(frozen=True, kw_only=True)
class Retired:
    """An old spelling that sets fields; `sets` maps the given text to field values, as if they had been typed."""

    spelling: str
    takes: Takes
    note: str
    sets: Callable[[str], Mapping[str, Any]]


def _no_warmup(text: str) -> Mapping[str, Any]:
    raise ConfigError(f"--warmup {text}: retired; use --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples")


@cache
def retired() -> Mapping[str, Retired]:
    full = {"recompute_granularity": "full"}
    rows = (
        Retired(
            spelling="--checkpoint-activations",
            takes="switch",
            note="taken as --recompute-granularity full --recompute-method uniform",
            sets=lambda _: {**full, "recompute_method": "uniform"},
        ),
        Retired(
            spelling="--activations-checkpoint-method",
            takes="value",
            note="taken as --recompute-granularity full with this --recompute-method",
            sets=lambda text: {**full, "recompute_method": text},
        ),
        Retired(
            spelling="--checkpoint-granularity",
            takes="value",
            note="taken as --recompute-granularity",
            sets=lambda text: {"recompute_granularity": text},
        ),
        Retired(
            spelling="--checkpoint-method",
            takes="value",
            note="taken as --recompute-method",
            sets=lambda text: {"recompute_method": text},
        ),
        Retired(
            spelling="--checkpoint-num-layers",
            takes="value",
            note="taken as --recompute-num-layers",
            sets=lambda text: {"recompute_num_layers": text},
        ),
        Retired(
            spelling="--activations-checkpoint-num-layers",
            takes="value",
            note="taken as --recompute-num-layers",
            sets=lambda text: {"recompute_num_layers": text},
        ),
        Retired(
            spelling="--no-query-key-layer-scaling",
            takes="switch",
            note="query-key layer scaling is off unless --apply-query-key-layer-scaling is given",
            sets=lambda _: {"apply_query_key_layer_scaling": False},
        ),
        Retired(
            spelling="--warmup",
            takes="value",
            note="refused: use --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples",
            sets=_no_warmup,
        ),
    )
    return MappingProxyType({row.spelling: row for row in rows})


def _flag(word: str, status: Status, note: str) -> KnownFlag:
    """ "--x" is a switch, "--x=" takes a value, "--x=neutral" has a neutral value, "--x=..." takes several."""
    spelling, equals, neutral = word.partition("=")
    if neutral == "...":
        return KnownFlag(spelling=spelling, status=status, note=note, takes="values")
    takes: Takes = "value" if equals else "switch"
    return KnownFlag(spelling=spelling, status=status, note=note, takes=takes, neutral=neutral or None)


@cache
def known_flags() -> Mapping[str, KnownFlag]:
    rows: dict[str, KnownFlag] = {}
    for note, words in names.LATER.items():
        rows.update((flag.spelling, flag) for flag in (_flag(word, "later", note) for word in words.split()))
    for note, words in names.NEVER.items():
        rows.update((flag.spelling, flag) for flag in (_flag(word, "never", note) for word in words.split()))
    for word, (note, accepts) in names.NO_OPS.items():
        flag = _flag(word, "no-op", note)
        rows[flag.spelling] = KnownFlag(
            spelling=flag.spelling, status="no-op", note=note, takes=flag.takes, accepts=tuple(accepts.split())
        )
    return MappingProxyType(rows)


def refused_family(spelling: str) -> str | None:
    """Whole families (RETRO, reinforcement learning, vision, ...) are refused by their prefix."""
    return next((note for prefix, note in names.FAMILIES.items() if spelling.startswith(prefix)), None)


def use_known(flag: KnownFlag, text: str) -> str | None:
    """The line a no-op prints, None for a neutral value, or a refusal."""
    spelled = f"{flag.spelling} {text}".rstrip()
    if flag.status == "no-op":
        if flag.accepts and text not in flag.accepts:
            raise ConfigError(f"{spelled}: not supported; use {' or '.join(flag.accepts)}, or leave the flag out")
        return f"{spelled}: {flag.note}"
    if flag.neutral is not None and _same(text, flag.neutral):
        return None
    verdict = "not supported yet" if flag.status == "later" else "not supported"
    raise ConfigError(f"{spelled}: {verdict}; {flag.note}")


def _same(text: str, neutral: str) -> bool:
    try:
        return float(text) == float(neutral)  # 0 and 0.0 ask for the same
    except ValueError:
        return text == neutral

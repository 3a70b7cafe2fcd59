"""Table of the keys of DeepSpeed's JSON and what each does here; docs/from_deepspeed.md is generated from it.

blocks.py reads the keys that are `decided` together with others.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from megatron.compat.deepspeed_file.keys import Key
from megatron.compat.deepspeed_file.other_keys import ACTIVATIONS, REPORTS, REST
from megatron.compat.deepspeed_file.training_keys import BATCH, OPTIMIZER, PRECISION, SCHEDULER
from megatron.compat.deepspeed_file.zero_keys import COMMUNICATION, OFFLOAD, STAGE3, ZERO

GROUPS: Mapping[str, tuple[Key, ...]] = MappingProxyType(
    {
        "Batch": BATCH,
        "Optimizer": OPTIMIZER,
        "Scheduler": SCHEDULER,
        "Precision": PRECISION,
        "Communication": COMMUNICATION,
        "ZeRO": (*ZERO, *STAGE3),
        "Offload": OFFLOAD,
        "Reports": REPORTS,
        "Activation checkpointing": ACTIVATIONS,
        "The rest": REST,
    }
)


@cache
def keys_by_path() -> Mapping[str, Key]:
    rows = [key for group in GROUPS.values() for key in group]
    table = {key.path: key for key in rows}
    assert len(table) == len(rows), "a key is in the table twice"
    return MappingProxyType(table)


@cache
def keys_by_field() -> Mapping[str, str]:
    """Maps a setting's name to the first key of the table that sets it."""
    found: dict[str, str] = {}
    for path, row in keys_by_path().items():
        if row.field is not None:
            found.setdefault(row.field, path)
    return MappingProxyType(found)


def children(path: str) -> list[str]:
    """Names of the keys under a block."""
    start = f"{path}." if path else ""
    return [key[len(start) :] for key in keys_by_path() if key.startswith(start) and "." not in key[len(start) :]]


def is_default(value: Any) -> bool:
    """True for null and Hugging Face's "auto", which leave the value to the flags."""
    return value is None or value == "auto"


def is_off(enabled: Any) -> bool:
    """True if this value of `enabled` leaves a block off, which is DeepSpeed's default."""
    return enabled is False or is_default(enabled)

"""The keys of DeepSpeed's JSON and what becomes of each: the one table, from which the page is generated.

Keys that are `decided` are read together with others by blocks.py.
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
    assert len(table) == len(rows), "a key stands twice in the table"
    return MappingProxyType(table)


@cache
def keys_by_field() -> Mapping[str, str]:
    """The first key of the table that fills a setting, by the setting's name."""
    found: dict[str, str] = {}
    for path, row in keys_by_path().items():
        if row.field is not None:
            found.setdefault(row.field, path)
    return MappingProxyType(found)


def children(path: str) -> list[str]:
    """The names that the table has under a block."""
    start = f"{path}." if path else ""
    return [key[len(start) :] for key in keys_by_path() if key.startswith(start) and "." not in key[len(start) :]]


def is_default(value: Any) -> bool:
    """A value that says nothing: null, or Hugging Face's "auto", which leaves it to the flags."""
    return value is None or value == "auto"


def is_off(enabled: Any) -> bool:
    """Whether this value of `enabled` leaves a block off, as every block of DeepSpeed's is by default."""
    return enabled is False or is_default(enabled)

"""Reads torch's record of the last collectives, which also shows what the device has completed."""

import json
import os

import torch

_ENTRIES = "2000"


def switch_on() -> None:
    """Enables the record, before the process group is made. It costs a few microseconds per collective."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def last_entries(count: int = 5) -> list[str]:
    """Last uncompleted collectives of this rank, oldest first; if all have completed, the last ones. [] without a
    record."""
    entries = sorted((entry for dump in _DUMPS for entry in _entries(dump)), key=_begun)
    under_way = [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
    return [_text(entry) for entry in (under_way or entries)[-count:]]


_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch's two records: one of nccl, missing in a torch without nccl, and one of gloo and the others."""


def _entries(name: str) -> list[dict[str, object]]:
    dump = getattr(torch._C._distributed_c10d, name, None)
    try:
        return [] if dump is None else list(json.loads(dump())["entries"])
    except (RuntimeError, ValueError, KeyError):  # nothing was recorded, or another version's format
        return []


def _begun(entry: dict[str, object]) -> int:
    return int(str(entry.get("time_created_ns", 0)))


def _text(entry: dict[str, object]) -> str:
    group = entry.get("process_group") or ["", ""]
    name = group[-1] if isinstance(group, list) else group
    return (
        f"{entry.get('profiling_name')} {entry.get('collective_seq_id')} of {entry.get('input_sizes')} over {name}: "
        f"{entry.get('state')}"
    )

"""The names and memory of this process's devices."""

from __future__ import annotations

from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The maker's name of the accelerator; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def accelerator_memory(device: torch.device) -> dict[str, int]:
    """Allocated and reserved bytes on the accelerator; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max_allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max_reserved": torch.cuda.max_memory_reserved(device),
    }


def record_memory_history(device: torch.device) -> None:
    """Starts recording allocations with their Python stacks (CUDA only)."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def end_memory_history(device: torch.device, path: Path) -> None:
    """Writes the recorded allocations for pytorch.org/memory_viz and stops recording."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")

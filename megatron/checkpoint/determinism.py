"""Determinism fingerprint of a run: conditions, besides settings, that must be equal for a bit-equal next loss.

The manifest stores the fingerprint. A run that resumes under other conditions logs a warning.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.layout import RANK_ORDER
from megatron.ops.select import Kernels
from megatron.utils.cpu import fp32_products
from megatron.utils.device import device_name

Fingerprint = Mapping[str, Any]


def determinism_fingerprint(device: torch.device, kernels: Kernels, bucket_size: int) -> dict[str, Any]:
    """Returns plain values. They omit the layout, because the manifest has it and the load reports a changed layout."""
    return {
        "device": device_name(device),
        **(_cpu() if device.type == "cpu" else {}),
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "bucket_size": bucket_size,
        "rank_order": RANK_ORDER,
        "torch": torch.__version__,
        "kernels": {choice.op: choice.backend for choice in kernels.choices},
    }


def _cpu() -> dict[str, Any]:
    return {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": torch.get_num_threads(),
        "fp32_products": fp32_products(),
    }


def changes(saved: Fingerprint, ours: Fingerprint) -> list[str]:
    """Lists the values that both fingerprints have and that differ. Earlier versions saved no fingerprint."""
    theirs = dict(_flat(saved))
    return [
        f"{name} {theirs[name]} -> {value}" for name, value in _flat(ours) if name in theirs and theirs[name] != value
    ]


def _flat(fingerprint: Fingerprint) -> Iterator[tuple[str, Any]]:
    for name, value in fingerprint.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", item) for inner, item in value.items())
        else:
            yield name, value

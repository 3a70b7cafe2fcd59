"""Resolves a run's kernels from its settings, the same on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.config import KernelsConfig
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.ops.library import Library
from megatron.ops.select import Kernels, resolve
from megatron.ops.verification import agreed
from megatron.utils.log import RankLog


def resolve_kernels(settings: KernelsConfig, device: torch.device, native: Library, log: RankLog) -> Kernels:
    return resolve(settings.spec, device.type, attention=settings.attention, native=native, warn=log.warn)


def verified_by_all(native: Library, parallel: ParallelState) -> Library:
    """Marks a CUDA kernel as unverified if any machine has not verified it. Each machine has tested its own GPU."""
    return agreed(native, all_gather_json(dict(native.unverified), parallel.world, dict[str, str]))


@dataclass(frozen=True)
class RankKernels:
    """Implementation of each operation on a rank, and the reason why none is native, if there is one."""

    backends: Mapping[str, str]
    note: str | None


def check_same_kernels(spec: str, kernels: Kernels, parallel: ParallelState) -> None:
    """Rejects ranks with different kernels: they round differently, so replicas of a parameter would drift apart."""
    mine = RankKernels({choice.op: choice.backend for choice in kernels.choices}, kernels.note)
    first, *others = all_gather_json(mine, parallel.world, RankKernels)
    for rank, other in enumerate(others, start=1):
        for op in (op for op, backend in first.backends.items() if other.backends.get(op) != backend):
            because = f" ({other.note or first.note})" if other.note or first.note else ""
            raise ConfigError(
                f"--kernels {spec}: {op} would be {other.backends.get(op)} on rank {rank} and {first.backends[op]} on "
                f"rank 0{because}, but ranks must use the same; build the kernels on every machine, or give "
                "--kernels ref"
            )

"""Gathers the sharded optimizer's state on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.distributed import collectives
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis


@dataclass(frozen=True)
class Entry:
    """One value of a parameter's state: shape and dtype of a tensor, or any other value itself."""

    number: int
    kind: str
    value: Any = None
    dtype: str | None = None
    shape: tuple[int, ...] = ()


def gather_state(
    state: Mapping[Tensor, Mapping[str, Any]],
    parameters: Sequence[Tensor],
    owner_of: Callable[[Tensor], int],
    axis: Axis,
) -> dict[int, dict[str, Any]]:
    """Gathers the whole state on every rank of the axis, by parameter number. Tensors are moved to the CPU."""
    mine: list[tuple[Entry, Tensor | None]] = []
    for number, parameter in enumerate(parameters):
        if owner_of(parameter) != axis.rank:
            continue
        for kind, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                entry = Entry(number, kind, None, str(value.dtype), tuple(value.shape))
                mine.append((entry, value))
            else:
                mine.append((Entry(number, kind, value), None))
    found: dict[int, dict[str, Any]] = {}
    everybody = all_gather_json(tuple(entry for entry, _ in mine), axis, tuple[Entry, ...])
    device = parameters[0].device
    for owner, entries in enumerate(everybody):
        for entry in entries:
            if entry.dtype is None:
                found.setdefault(entry.number, {})[entry.kind] = entry.value
        for dtype in dict.fromkeys(entry.dtype for entry in entries if entry.dtype is not None):
            some = [entry for entry in entries if entry.dtype == dtype]
            sizes = [torch.Size(entry.shape).numel() for entry in some]
            if owner == axis.rank:
                tensors = [tensor for entry, tensor in mine if tensor is not None and entry.dtype == dtype]
                message = torch.cat([tensor.detach().reshape(-1).to(device) for tensor in tensors])
            else:
                message = torch.empty(sum(sizes), dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            parts = collectives.broadcast(message, axis, owner).cpu().split(sizes)
            for entry, part in zip(some, parts, strict=True):
                found.setdefault(entry.number, {})[entry.kind] = part.view(entry.shape).clone()
    return dict(sorted(found.items()))

"""Implements --check-replicas-every: replicas of a parameter must be bit-identical on all ranks that hold them.

A spec describes which index range of a parameter a rank holds. Every range gets a fingerprint, and ranks that hold the
same range must have the same fingerprint. Data-parallel ranks have replicas of the whole model. Tensor-parallel ranks
have replicas of norms and biases, and of KV heads if there are fewer heads than ranks. A tied token embedding has
replicas on the first and the last pipeline stage. The check covers weights, running buffers and the optimizer's state.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megatron.distributed.collectives import all_reduce
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis
from megatron.engine import Engine
from megatron.errors import ReplicaError
from megatron.parallelize import persistent_buffers
from megatron.state.division import Range
from megatron.state.shard import Shard, by_range
from megatron.training.hooks import Hook
from megatron.utils.dtype import resolved

Key = tuple[str, int, Range]
"""(name of the tensor, dimension that is split, index range)."""
Fingerprints = dict[Key, int]

_BLOCK = 1 << 20
"""Number of elements hashed at a time: limits the scratch memory."""
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_LOW = (1 << 32) - 1
_INTEGER_OF = {1: torch.int8, 2: torch.int16}  # by bytes per element; other sizes are hashed four bytes at a time


class ReplicaCheck(Hook):
    """Compares replicas every `every` iterations. A collective of all ranks."""

    def __init__(self, every: int, engine: Engine, specs: Mapping[str, Shard]) -> None:
        self._every, self._engine, self._specs, self._state = every, engine, specs, engine.parallel

    def after_iteration(self, iteration: int) -> None:
        if iteration % self._every == 0:
            self._engine.settle()  # reports a bad step first
            self.check(iteration)

    @torch.no_grad()
    def check(self, iteration: int) -> None:
        mine = self._fingerprints()
        # Any two replicas of a tensor are connected by one of these two axes, or by both in turn.
        differing = [_differing(_everyone(mine, axis)) for axis in (self._state.dp_cp, self._state.model)]
        flag = torch.tensor([float(any(differing))], device=self._engine.device)
        all_reduce(flag, self._state.world, op="max")
        if flag.item():
            raise ReplicaError(_message(_everyone(mine, self._state.world), iteration))

    def _fingerprints(self) -> Fingerprints:
        found: Fingerprints = {}
        for what, dim, parts in self._tensors():
            for held, part in parts:
                found[what, dim, held] = tensor_hash(part)
        return found

    def _tensors(self) -> Iterator[tuple[str, int, Iterable[tuple[Range, Tensor]]]]:
        """Yields (name, split dimension, parts) in the order of the model. Weights come first: if they differ, the rest
        differs too. With ZeRO, a piece of the state has few replicas or none."""
        state, grads = self._engine.optimizer.state(), self._engine.store
        shapes: dict[str, torch.Size] = {}
        for name, tensor in chain(self._engine.whole_weights(), persistent_buffers(self._engine.model).items()):
            shapes[name] = tensor.shape
            yield name, self._specs[name].dim, by_range(self._specs[name], tensor.detach())
        for name, moments in state.items():
            shard, (start, stop) = replace(self._specs[name], division=grads.divisions[name]), grads.held(name)
            for key, tensor in moments.items():
                if shard.division is None and tensor.shape == shapes[name]:
                    yield f"{name} (optimizer: {key})", shard.dim, by_range(shard, tensor)
                elif shard.division is not None and tensor.numel() == stop - start:
                    elements = f"elements {start} to {stop}"
                    yield f"{name} (optimizer: {key}, {elements})", shard.dim, by_range(shard, tensor)


def tensor_hash(tensor: Tensor) -> int:
    """64-bit hash of the tensor's bits, in order, computed on its device. Changing one element of at most four bytes
    always changes the hash (its factor is odd). Any other change goes undetected with a probability of about 2**-60."""
    bits = resolved(tensor).contiguous().view(-1).view(_INTEGER_OF.get(tensor.element_size(), torch.int32))
    whole = bits.numel()
    factors = _factors(min(_BLOCK, whole), bits.device)
    for block in bits.split(_BLOCK):
        mixed = block.to(torch.int64) * factors[: block.numel()]  # wraps around on purpose
        mixed ^= (mixed >> 32) & _LOW  # otherwise two flipped signs could cancel
        whole = (whole * _FACTOR + int(mixed.sum())) & _MASK
    return whole


def _factors(count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers: splitmix64 of the index."""
    signed = _FACTOR - (1 << 64)
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * signed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - (1 << 64))
    return x | 1


def _everyone(mine: Fingerprints, axis: Axis) -> list[Fingerprints]:
    told = tuple((name, dim, *held, value) for (name, dim, held), value in mine.items())
    everyone = all_gather_json(told, axis, tuple[tuple[str, int, int, int, int], ...])
    return [{(name, dim, (start, stop)): value for name, dim, start, stop, value in one} for one in everyone]


def _differing(ranks: Iterable[Fingerprints]) -> list[Key]:
    """Tensors that differ between two ranks, in the order of the model."""
    seen: Fingerprints = {}
    differing: dict[Key, None] = {}
    for found in ranks:
        for key, value in found.items():
            if seen.setdefault(key, value) != value:
                differing[key] = None
    order = {key: place for place, key in enumerate(seen)}
    return sorted(differing, key=lambda key: order[key])


def _message(ranks: list[Fingerprints], iteration: int) -> str:
    differing = _differing(ranks)
    first = differing[0]
    values = {rank: found[first] for rank, found in enumerate(ranks) if first in found}
    common = Counter(values.values()).most_common(1)[0][0]
    alike = [rank for rank, value in values.items() if value == common]
    odd = [rank for rank, value in values.items() if value != common]
    more = f" (and {len(differing) - 1} more tensors)" if len(differing) > 1 else ""
    return (
        f"--check-replicas-every, iteration {iteration}: the replicas of {first[0]} differ: {_listed(odd)} from "
        f"{_listed(alike)}{more}. A rank computed, sent or stored wrong values. This step is not saved; resume from "
        "the last checkpoint with --load. If the same rank differs again, exclude its machine"
    )


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

"""--check-replicas-every: copies of one parameter must be equal, bit for bit, on all ranks that hold it.

Which ranks share what follows from the specs: two ranks that hold the same index range of a parameter must hold the
same bits, whatever the axis between them. So every held range gets a fingerprint, and equal ranges are compared: the
whole model over data-parallel ranks, norms and biases over tensor-parallel ones, keys and values that are fewer than
the ranks, a tied table on the first and the last stage, experts. Weights, running buffers and the optimizer's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megatron.distributed.collectives import all_gather_object, all_reduce
from megatron.distributed.shard import Range, ShardSpec
from megatron.distributed.state import ParallelState
from megatron.errors import ReplicaError
from megatron.optimizer import Optimizer
from megatron.parallelize import persistent_buffers

Key = tuple[str, int, Range]
"""What of which tensor: its name, the dimension that is split, the index range."""
Fingerprints = dict[Key, int]

_BLOCK = 1 << 20
"""Elements that are mixed at a time: the scratch stays small whatever the parameter."""
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_INTEGER_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """A collective: every rank calls it after the same steps."""

    def __init__(
        self, model: nn.Module, specs: Mapping[str, ShardSpec], optimizer: Optimizer, state: ParallelState
    ) -> None:
        self._model, self._specs, self._optimizer, self._state = model, specs, optimizer, state

    @torch.no_grad()
    def __call__(self, iteration: int) -> None:
        mine = self._fingerprints()
        # Who shares a tensor is on one of these two axes with this rank, or shares it with somebody who is.
        differing = [_differing(all_gather_object(mine, axis)) for axis in (self._state.dp_cp, self._state.model)]
        flag = torch.tensor([float(any(differing))], device=next(self._model.parameters()).device)
        all_reduce(flag, self._state.world, op="max")
        if flag.item():
            raise ReplicaError(_message(all_gather_object(mine, self._state.world), iteration))

    def _fingerprints(self) -> Fingerprints:
        found: Fingerprints = {}
        for name, tensor, spec in self._tensors():
            for held, part in _parts(spec, tensor):
                found[name, spec.dim, held] = fingerprint(part)
        return found

    def _tensors(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        """In the order of the model: the weights come first, since what else differs follows from them."""
        state = self._optimizer.state()
        parameters = dict(self._model.named_parameters())
        for name, tensor in {**parameters, **persistent_buffers(self._model)}.items():
            yield name, tensor.detach(), self._spec(name, tensor)
        for name, moments in state.items():
            for key, tensor in moments.items():
                if tensor.shape == parameters[name].shape:
                    yield f"{name} (optimizer: {key})", tensor, self._spec(name, tensor)

    def _spec(self, name: str, tensor: Tensor) -> ShardSpec:
        return self._specs.get(name) or ShardSpec(name=name, logical_shape=tuple(tensor.shape))


def _parts(spec: ShardSpec, tensor: Tensor) -> Iterator[tuple[Range, Tensor]]:
    """Each index range that is held, and its elements; rows that only pad belong to none."""
    view = spec.view(tensor)
    offset = 0
    for start, stop in spec.held:
        yield (start, stop), view.narrow(spec.dim, offset, stop - start) if view.dim() else view
        offset += stop - start


def fingerprint(tensor: Tensor) -> int:
    """64 bits of all bits of the tensor, in order. One changed element always changes it (its factor is odd), and
    any other change does but for one chance in 2**60 or so. Computed where the tensor is."""
    bits = tensor.contiguous().view(-1).view(_INTEGER_OF[tensor.element_size()])
    whole = bits.numel()
    factors = _factors(min(_BLOCK, whole), bits.device)
    for block in bits.split(_BLOCK):
        mixed = (block.to(torch.int64) * factors[: block.numel()]).sum()  # wraps around, which is meant
        whole = (whole * _FACTOR + int(mixed)) & _MASK
    return whole


def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers without pattern: splitmix64 of the place."""
    signed = _FACTOR - (1 << 64)
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * signed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - (1 << 64))
    return x | 1


def _differing(ranks: Iterable[Fingerprints]) -> list[Key]:
    """The tensors of which two ranks hold different bits, in the order of the model."""
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
        f"--check-replicas-every, iteration {iteration}: the copies of {first[0]} are not equal: {_listed(odd)} not as "
        f"{_listed(alike)}{more}. A rank computed, sent or kept something wrong, and the step is not saved; resume "
        "from the last checkpoint with --load, and if the same rank differs again, leave its machine out"
    )


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

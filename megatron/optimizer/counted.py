"""Which rank counts which elements in a sum over the whole model: every element once, however it is split or copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.data_parallel import Gradients
from megatron.optimizer.norms import SplitOver
from megatron.state.shard import Range, Shard


@dataclass(frozen=True)
class _Place:
    """Where one parameter's piece on this rank is counted."""

    spec: Shard | None
    """None: every rank holds the same and counts all of it."""
    group: int
    """The number of the group of parameters that are split and divided over the same axes."""
    piece: Range | None
    """The elements that this rank has under ZeRO; None: all."""


class CountedParts:
    """Groups tensors, given with the names of their parameters, by the axes that the parameters are split and divided
    over."""

    def __init__(
        self,
        grads: Gradients,
        split_over: Mapping[str, SplitOver],
        specs: Mapping[str, Shard],
        axes: Sequence[SplitOver],
    ) -> None:
        """`axes`: groups that are returned even if they are empty."""
        numbers = {over: number for number, over in enumerate(dict.fromkeys(axes))}
        self._places: dict[str, _Place] = {}
        for name in grads.names:  # here, not in every step: a small step has as many parameters as a large one
            divided = grads.divided_over(name)
            own = (divided,) if divided.size > 1 else ()
            group = numbers.setdefault((*split_over.get(name, ()), *own), len(numbers))
            self._places[name] = _Place(specs.get(name), group, grads.held(name) if own else None)
        self._axes = tuple(numbers)

    def __call__(self, tensors: Iterable[tuple[str, Tensor]], counted: bool = True) -> dict[SplitOver, list[Tensor]]:
        """The elements that this rank counts or, unless `counted`, those that another rank counts."""
        groups: list[list[Tensor]] = [[] for _ in self._axes]
        for name, tensor in tensors:
            place = self._places[name]
            if place.spec is None:
                parts = [tensor] if counted else []
            else:
                parts = place.spec.counted(tensor, place.piece) if counted else place.spec.copied(tensor, place.piece)
            groups[place.group].extend(parts)
        return dict(zip(self._axes, groups, strict=True))

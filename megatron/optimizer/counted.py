"""Which rank counts which elements in a sum over the whole model: every element once, however it is split or copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from megatron.data_parallel import Gradients
from megatron.optimizer.norms import SplitOver
from megatron.state.shard import Shard


class CountedParts:
    """Groups tensors, given with the names of their parameters, by the axes that the parameters are split and divided
    over."""

    def __init__(
        self,
        grads: Gradients,
        split_over: Mapping[str, SplitOver],
        shards: Mapping[str, Shard],
        axes: Sequence[SplitOver],
    ) -> None:
        """`shards`: of a parameter without one every rank counts all that it has. `axes`: groups that are returned even
        if they are empty."""
        numbers = {over: number for number, over in enumerate(dict.fromkeys(axes))}
        self._shards, self._group_of = shards, dict[str, int]()
        for name in grads.names:  # here, not in every step: a small step has as many parameters as a large one
            divided = grads.divided_over(name)
            own = (divided,) if divided.size > 1 else ()
            self._group_of[name] = numbers.setdefault((*split_over.get(name, ()), *own), len(numbers))
        self._axes = tuple(numbers)

    def __call__(self, tensors: Iterable[tuple[str, Tensor]], counted: bool = True) -> dict[SplitOver, list[Tensor]]:
        """The elements that this rank counts or, unless `counted`, those that another rank counts."""
        groups: list[list[Tensor]] = [[] for _ in self._axes]
        for name, tensor in tensors:
            shard = self._shards.get(name)
            if shard is None:
                parts = [tensor] if counted else []
            else:
                parts = shard.counted(tensor) if counted else shard.copied(tensor)
            groups[self._group_of[name]].extend(parts)
        return dict(zip(self._axes, groups, strict=True))

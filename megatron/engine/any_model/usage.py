"""Which parameters took part in a step, and the buffers that the model changes itself: what ranks must agree on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatron.data_parallel import FullySharded, GradBuffers
from megatron.data_parallel.broadcast import share_buffers
from megatron.distributed import collectives
from megatron.distributed.state import Axis


class Usage:
    """An optimizer of torch leaves a parameter without a gradient alone: no weight decay, no decaying moments. Over
    several ranks that is one that no rank has used, for which they compare notes.

    Only a model that had such parameters in its first step pays for that in every step; in any other, one that is
    left out later counts as having a gradient of zero. Where gradients are divided as they come (ZeRO 2 and 3), each
    has one of zero.
    """

    def __init__(self, grads: GradBuffers | FullySharded, model: nn.Module, dp: Axis) -> None:
        self._whole = grads if isinstance(grads, GradBuffers) else None
        self._dp = dp
        self.compares: bool | None = None
        """Whether ranks compare notes; None before the first step."""
        self._absent: Collection[str] = ()
        self._model = model
        self._has_buffers = any(True for _ in model.buffers())

    def absent(self) -> Collection[str]:
        """The parameters that got no gradient on any rank in the step that is being made."""
        return self._absent

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Around reduction and update. All ranks call it."""
        self._absent = self._find_absent(self._whole) if self._whole and self.compares is not False else ()
        yield
        self._absent = ()

    def _find_absent(self, grads: GradBuffers) -> Collection[str]:
        names, missing = grads.names, set(grads.missing())
        if self._dp.size == 1:
            self.compares = bool(missing) if self.compares is None else self.compares
            return missing
        used = torch.tensor(
            [name not in missing for name in names], dtype=torch.int32, device=grads.parameter(names[0]).device
        )
        seen = collectives.all_reduce(used, self._dp).tolist()
        if self.compares is None:
            self.compares = any(number < self._dp.size for number in seen)
        return {name for name, number in zip(names, seen, strict=True) if number == 0}

    def share_buffers(self) -> None:
        """Ranks saw different samples, so buffers such as running means differ; the first rank's are used and saved."""
        if self._has_buffers:
            share_buffers(self._model, self._dp)

"""Where the pieces of parameters lie in flat tensors, and at which rates each of them learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.optimizer.groups import GroupRule, Rates
from megatron.state.store import FlatRun


@dataclass(frozen=True)
class Places:
    pieces: Mapping[str, tuple[slice, torch.Size]]
    """By name, where a piece lies, and its shape."""
    ends: Tensor
    """Of each piece."""
    factors: Tensor
    """[pieces, 2]: on learning rate and weight decay."""
    decoupled: Tensor
    """Which pieces have the decoupled learning rate."""

    @staticmethod
    def of(grads: TrainingStore, flat: FlatRun, rules: Mapping[str, GroupRule], device: torch.device) -> Places:
        """Makes the places of these pieces, with their numbers on `device`, where the update reads them."""
        groups = [rules[name] for name in flat.names]
        places = (slice(*ends) for ends in pairwise((0, *flat.ends)))
        return Places(
            {name: (place, grads.weight(name).shape) for name, place in zip(flat.names, places, strict=True)},
            torch.tensor(flat.ends).to(device),
            torch.tensor([[group.lr_mult, group.wd_mult] for group in groups], dtype=torch.float32).to(device),
            torch.tensor([group.decoupled for group in groups]).to(device),
        )

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views of a flat tensor: each piece's part of it, in the piece's shape."""
        return ((name, flat[place].view(shape)) for name, (place, shape) in self.pieces.items())

    def factors_at(self, rates: Rates) -> Tensor:
        """Each piece's factors on the rates of `step_control`. With two learning rates the rates themselves are in the
        factors, which multiply 1: rounding is then as with one rate."""
        if rates.decoupled_lr is None:
            return self.factors
        lr = torch.where(self.decoupled, rates.decoupled_lr, rates.lr).to(self.factors.dtype)
        return torch.stack([self.factors[:, 0] * lr, self.factors[:, 1]], 1)

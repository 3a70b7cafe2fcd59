"""Initial values: drawn by (seed, name) over the logical shape, then sliced. Every layout starts as the same model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron.distributed.shard import ShardSpec
from megatron.model.init import initial_value
from megatron.model.parameters import Parameter


@torch.no_grad()
def initialise_part(part: nn.Module, specs: Mapping[str, ShardSpec], table: Mapping[str, Parameter], seed: int) -> None:
    """Sets the parameters of one rank's part of the model."""
    for name, stored in part.named_parameters():
        spec = specs[name]
        stored.zero_()  # vocabulary padding rows stay zero: they have no meaning
        spec.view(stored).copy_(spec.take(initial_value(table[name], seed)))

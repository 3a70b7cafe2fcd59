"""Initial values: drawn by (seed, name) over the logical shape, then sliced. Every layout starts as the same model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.distributed.shard import ShardSpec
from megatron.model.init import initial_value


@torch.no_grad()
def initialise_gpt(model: nn.Module, specs: Mapping[str, ShardSpec], config: ModelConfig, seed: int) -> None:
    for name, parameter in model.named_parameters():
        spec = specs[name]
        parameter.zero_()  # vocabulary padding rows stay zero: they have no meaning
        drawn = initial_value(name, spec.logical_shape, config, seed)
        spec.view(parameter).copy_(spec.take(drawn))

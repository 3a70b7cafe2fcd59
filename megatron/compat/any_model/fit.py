"""Whether the engine can train a model, before anything of it is changed."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from megatron.compat.any_model.engine import ModelEngine
from megatron.errors import ConfigError
from megatron.utils.dtype import refuse_complex


def checked_model(model: Any) -> nn.Module:
    if model is None:
        raise ConfigError(
            "megatron.compat.initialize(): no model; give model=, an nn.Module (settings of a run: "
            "megatron.pretrain.setup)"
        )
    if isinstance(model, type) or not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"megatron.compat.initialize(): model is {what}; give an instance of nn.Module")
    if isinstance(model, ModelEngine):
        raise ConfigError("megatron.compat.initialize(): model is an engine already; go on with that engine")
    if any(hasattr(one, "device_mesh") for one in model.parameters()):  # a DTensor, whose import takes long
        raise ConfigError(
            "megatron.compat.initialize(): the model's parameters are divided already, by an engine that it was given "
            "to before or by fully_shard; give a model whose parameters are whole"
        )
    lazy = [name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter) or one.is_meta]
    if lazy:
        raise ConfigError(
            f"megatron.compat.initialize(): {lazy[0]} has no values yet; call a lazy module once with a batch, and "
            "model.to_empty(device=...) and its initialisation for one on the meta device"
        )
    refuse_complex(model, "megatron.compat.initialize()")
    for (first, (_, end)), (second, (start, _)) in itertools.pairwise(_places(model)):
        if start < end:
            raise ConfigError(
                f"megatron.compat.initialize(): {first} and {second} are two parameters in the same memory, which "
                "would go apart here; use one of them in both places (F.linear(x, other.weight.t())), or give "
                f"{second} its own with clone()"
            )
    return model


def _places(model: nn.Module) -> list[tuple[str, tuple[int, int]]]:
    """Of each parameter, from its first byte to behind its last, in the order of memory."""
    places = []
    for name, one in model.named_parameters():
        last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        if one.numel():
            places.append((name, (one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size())))
    return sorted(places, key=lambda place: place[1])

"""Weights between our logical views and the tensors of a Hugging Face model.

A `TensorLayout` holds both directions side by side, so that import(export(x)) is x. Nothing is permuted for RoPE: both
rotate half-split heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.model.parameters import Parameter, Row

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class TensorLayout:
    """How another model keeps the weight, and likewise the bias, of one of our modules."""

    modules: tuple[str, ...]
    """Theirs, with `{layer}` and `{expert}` as in the rows of the parameter table."""
    split: Callable[[Tensor, Row], Tensors]
    """Our logical view -> their tensors."""
    join: Callable[[Tensors, Row], Tensor]
    """Their tensors -> our logical view."""


@dataclass(frozen=True)
class Exchange:
    """One of our parameters and the tensors that hold it in the other model."""

    parameter: Parameter
    layout: TensorLayout
    gain_less_one: bool = False

    @property
    def theirs(self) -> tuple[str, ...]:
        kind = self.parameter.row.name.rpartition(".")[2]
        numbers = {"layer": self.parameter.layer, "expert": self.parameter.expert}
        return tuple(f"{module.format(**numbers)}.{kind}" for module in self.layout.modules)

    def to_hf(self, stored: Tensor) -> dict[str, Tensor]:
        logical = stored[: self.parameter.stored_shape[0]].view(self.parameter.shape)
        parts = self.layout.split(logical + 1 if self.gain_less_one else logical, self.parameter.row)
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}

    def from_hf(self, read: Callable[[str], Tensor]) -> Tensor:
        logical = self.layout.join(tuple(read(name) for name in self.theirs), self.parameter.row)
        return (logical - 1 if self.gain_less_one else logical).contiguous().view(self.parameter.stored_shape)


def gain_less_one(config: ModelConfig, name: str) -> bool:
    """Whether this is the weight of a norm stored as gamma - 1 (--apply-layernorm-1p). Hugging Face stores gamma."""
    return config.apply_layernorm_1p and name.endswith("layernorm.weight")


# ---------------------------------------------------------------- layouts that families share


def same(module: str) -> TensorLayout:
    """The matrix or vector as we store it."""
    return TensorLayout(
        (module,), lambda ours, row: (ours.reshape(row.stored_shape),), lambda parts, row: parts[0].reshape(row.shape)
    )


def separate_qkv(query: str, key: str, value: str) -> TensorLayout:
    return TensorLayout((query, key, value), lambda ours, row: heads_apart(ours), heads_together)


def separate_gate_and_up(gate: str, up: str) -> TensorLayout:
    return TensorLayout((gate, up), lambda ours, row: (ours[0], ours[1]), lambda parts, row: torch.stack(parts))


def heads_apart(qkv: Tensor) -> Tensors:
    """[groups, q + 2, head_dim, ...] -> Q [heads * head_dim, ...], K and V [groups * head_dim, ...]."""
    rest = qkv.shape[3:]
    query, key, value = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def heads_together(parts: Tensors, row: Row) -> Tensor:
    """The inverse of `heads_apart`."""
    groups, slots, width, *rest = row.shape
    query, key, value = parts
    query = query.reshape(groups, slots - 2, width, *rest)
    return torch.cat([query, key.reshape(groups, 1, width, *rest), value.reshape(groups, 1, width, *rest)], dim=1)

"""Converts weights between our logical views and the tensors of a Hugging Face model.

A `TensorLayout` holds both directions side by side, so that import(export(x)) is x. Nothing is permuted for RoPE: both
models rotate half-split heads. Import uses views of the other model's tensors, so only what is copied is read from a
mapped file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.model.parameters import Parameter, Row
from megatron.state.division import Range

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class TensorLayout:
    """Layout of one module's weight in another model, and likewise of its bias."""

    modules: tuple[str, ...]
    """Names of the other model's modules, with `{layer}` and `{expert}` as in the rows of the parameter table."""
    split: Callable[[Tensor, Row], Tensors]
    """Function from our logical view to the other model's tensors."""
    blocks: Callable[[Tensors, Row], Tensors]
    """Function from the other model's tensors to views that, joined along one dimension, are our logical view."""
    along: int = 0
    """Dimension along which blocks are joined. If there are several blocks, ranks do not split this dimension."""


@dataclass(frozen=True)
class Exchange:
    """Pair of one of our parameters and the tensors that hold it in the other model."""

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
        if self.gain_less_one:
            logical = logical.float() + 1  # half precision has fewer digits near 1 than near 0
        parts = self.layout.split(logical, self.parameter.row)
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}

    def from_hf(self, read: Callable[[str], Tensor]) -> Tensor:
        return self.part_from_hf(read, 0, None).contiguous().view(self.parameter.stored_shape)

    def part_from_hf(self, read: Callable[[str], Tensor], dim: int, part: Range | None) -> Tensor:
        """Returns our logical view, or `part` of its dimension `dim`; only that part of the tensors is read."""
        blocks = self.layout.blocks(tuple(read(name) for name in self.theirs), self.parameter.row)
        if part is not None:
            assert len(blocks) == 1 or dim != self.layout.along, f"{self.parameter.name} is split along its blocks"
            blocks = tuple(block.narrow(dim, part[0], part[1] - part[0]) for block in blocks)
        logical = blocks[0] if len(blocks) == 1 else torch.cat(blocks, self.layout.along)
        return logical - 1 if self.gain_less_one else logical


def gain_less_one(config: ModelConfig, name: str) -> bool:
    """True for the weight of a norm that we store as gamma - 1 (--apply-layernorm-1p). Hugging Face stores gamma."""
    return config.apply_layernorm_1p and name.endswith("layernorm.weight")


# ---------------------------------------------------------------- layouts that families share


def same(module: str) -> TensorLayout:
    """Layout of a matrix or vector that both models store in the same way."""
    return TensorLayout(
        (module,), lambda ours, row: (ours.reshape(row.stored_shape),), lambda parts, row: (parts[0].view(row.shape),)
    )


def separate_qkv(query: str, key: str, value: str) -> TensorLayout:
    return TensorLayout((query, key, value), lambda ours, row: heads_apart(ours), heads_of_groups, along=1)


def separate_gate_and_up(gate: str, up: str) -> TensorLayout:
    return TensorLayout(
        (gate, up), lambda ours, row: (ours[0], ours[1]), lambda parts, row: (parts[0][None], parts[1][None])
    )


def heads_apart(qkv: Tensor) -> Tensors:
    """Splits [groups, q + 2, head_dim, ...] into Q [heads * head_dim, ...], K and V [groups * head_dim, ...]."""
    rest = qkv.shape[3:]
    query, key, value = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def heads_of_groups(parts: Tensors, row: Row) -> Tensors:
    """Inverts `heads_apart`, in blocks along the heads of a group."""
    groups, slots, width, *rest = row.shape
    query, key, value = parts
    return (
        query.view(groups, slots - 2, width, *rest),
        key.view(groups, 1, width, *rest),
        value.view(groups, 1, width, *rest),
    )

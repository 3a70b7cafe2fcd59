"""Tensor parallelism applied to a plain GPT: its linear layers and tables are replaced by parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.distributed.rng import SplitRandom
from megatron.distributed.shard import ShardSpec
from megatron.distributed.state import Axis
from megatron.model.attention import SelfAttention
from megatron.model.block import Block
from megatron.model.embedding import Embedding, Table
from megatron.model.gpt import GPT
from megatron.model.linear import Linear
from megatron.model.moe import Router
from megatron.parallelize.experts import is_expert
from megatron.parallelize.table import VOCABULARY_TABLES
from megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelHead, VocabParallelTable
from megatron.tensor_parallel.embedding import SequenceSlicedTable

_COLUMN = ("query_key_value", "dense_h_to_4h")
_ROW = ("dense", "dense_4h_to_h")


def split_tensors(
    model: GPT, specs: Mapping[str, ShardSpec], tp: Axis, *, sequence_parallel: bool, device: torch.device
) -> None:
    """In place. `model` is on the meta device: this rank's parameters are made on `device`, not yet set."""
    _make_parameters(model, specs, tp, device)
    if model.rotary is not None:
        model.rotary.to_empty(device=device)  # which computes its frequencies anew
    for router in (module for module in model.modules() if isinstance(module, Router)):
        if router.expert_bias is not None:
            router.expert_bias = torch.zeros_like(router.expert_bias, device=device)
    if tp.size == 1:
        return
    for name, module in list(model.named_modules()):
        if is_expert(name):
            continue  # their parts are summed once for all of them, where tokens come and go
        new = _parallel_twin(name, module, tp, sequence_parallel)
        if new is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
    if model.head_and_loss is not None:
        head = VocabParallelHead(
            model.vocab_size, model.head_and_loss.kernels, axis=tp, sequence_parallel=sequence_parallel
        )
        model.head_and_loss = head  # type: ignore[assignment]
    _split_heads(model, tp)
    _split_dropout(model, SplitRandom(tp, device), sequence_parallel)


def _make_parameters(model: GPT, specs: Mapping[str, ShardSpec], tp: Axis, device: torch.device) -> None:
    for name, parameter in list(model.named_parameters()):
        if name in VOCABULARY_TABLES:
            shape: tuple[int, ...] = (parameter.shape[0] // tp.size, parameter.shape[1])
        else:
            shape = stored_part(specs[name], parameter.shape)
        owner, _, leaf = name.rpartition(".")
        new = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=device))
        setattr(model.get_submodule(owner), leaf, new)


def stored_part(spec: ShardSpec, whole: torch.Size) -> tuple[int, ...]:
    """The stored shape of what a spec holds, of a parameter whose whole is stored as `whole`."""
    if len(whole) == 1:
        return (prod(spec.local_shape),)
    joined = spec.split_shape
    for columns in range(1, len(joined)):
        if (prod(joined[:columns]), prod(joined[columns:])) == tuple(whole):
            return prod(spec.local_shape[:columns]), prod(spec.local_shape[columns:])
    raise AssertionError(f"{spec.name}: {tuple(whole)} does not store {spec.logical_shape}")


def _parallel_twin(name: str, module: nn.Module, tp: Axis, sequence_parallel: bool) -> nn.Module | None:
    leaf = name.rpartition(".")[2]
    if isinstance(module, Linear):
        kind = ColumnParallelLinear if leaf in _COLUMN else RowParallelLinear
        assert leaf in _COLUMN + _ROW, f"no row says how {name} is split"
        new = kind(0, 0, axis=tp, bias=False, sequence_parallel=sequence_parallel, weight=module.weight)
        new.bias = module.bias
        return new
    if leaf == "word_embeddings" and isinstance(module, Table):
        return VocabParallelTable(module.weight, axis=tp, sequence_parallel=sequence_parallel)
    if leaf == "position_embeddings" and isinstance(module, Table) and sequence_parallel:
        return SequenceSlicedTable(module.weight, axis=tp)
    return None


def _split_heads(model: GPT, tp: Axis) -> None:
    """With fewer KV groups than ranks, a rank's one group has fewer queries."""
    groups = model.config.query_groups
    for module in model.modules():
        if isinstance(module, SelfAttention) and groups % tp.size:
            module.query_per_group //= tp.size // groups


def _split_dropout(model: GPT, stream: SplitRandom, sequence_parallel: bool) -> None:
    """Dropout on split tensors draws from a stream of each rank's own; on copies, from the one they share."""

    def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
        if not training or probability == 0.0:
            return F.dropout(x, probability, training)
        with stream.fork():
            return F.dropout(x, probability, training)

    for module in list(model.modules()):
        if isinstance(module, SelfAttention) and model.config.attention_dropout:
            module.core_attention = _InStream(module.core_attention, stream)  # type: ignore[assignment]
        if isinstance(module, (Embedding, Block)) and sequence_parallel:
            module.dropout = dropout


class _InStream(nn.Module):
    """A core attention whose dropout falls on this rank's heads alone."""

    def __init__(self, core: nn.Module, stream: SplitRandom) -> None:
        super().__init__()
        self.core, self.stream = core, stream

    def forward(self, *args: object) -> Tensor:
        if not self.training:
            return self.core(*args)
        with self.stream.fork():
            return self.core(*args)

"""A plain GPT cut into pipeline stages: what one rank holds, and its stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from megatron.config.stages import StageLayers
from megatron.distributed.shard import ShardSpec
from megatron.distributed.state import Axis
from megatron.distributed.wgrad_queue import WgradQueue
from megatron.model.embedding import HeadTable
from megatron.model.gpt import GPT
from megatron.model.linear import Linear
from megatron.parallelize.table import persistent_buffers
from megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear

TIED_TABLE = "embedding.word_embeddings.weight"


def held_by_rank(model: GPT, layers: StageLayers, rank: int) -> GPT:
    """The parts of the model that are on this rank, under their own names. The layers are the model's own modules."""
    if layers.ranks == 1:
        return model
    held = [layer for run in layers.of_rank(rank) for layer in run]
    return _part(model, held, first=rank == 0, last=rank == layers.ranks - 1)


def stages_of_rank(held: GPT, layers: StageLayers, rank: int) -> list[GPT]:
    """The stages of what is held here; they share its modules."""
    if layers.ranks == 1:
        return [held]
    runs = layers.of_rank(rank)
    first, last = rank == 0, rank == layers.ranks - 1
    return [
        _part(held, list(run), first=first and chunk == 0, last=last and chunk == len(runs) - 1)
        for chunk, run in enumerate(runs)
    ]


def held_specs(specs: Mapping[str, ShardSpec], held: GPT, pp: Axis) -> dict[str, ShardSpec]:
    """The specs of what is held here. A tied table is on the first and on the last stage: a copy, and a sum."""
    names = [*(name for name, _ in held.named_parameters()), *persistent_buffers(held)]
    mine = {name: specs[name] for name in names}
    if held.config.tied and pp.size > 1 and TIED_TABLE in mine:
        spec = mine[TIED_TABLE]
        copies = spec.held if pp.rank else spec.copies
        mine[TIED_TABLE] = replace(spec, replica_axes=(*spec.replica_axes, "embedding"), copies=copies)
    return mine


def _part(model: GPT, layers: Sequence[int], *, first: bool, last: bool) -> GPT:
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.layers = nn.ModuleDict({str(layer): model.layers[str(layer)] for layer in layers})
    if not first:
        tied_head = last and model.config.tied and model.embedding is not None
        part.embedding = HeadTable(model.embedding.word_embeddings) if tied_head else None  # type: ignore
    if not last:
        part.final_layernorm = part.output_layer = part.head_and_loss = None
    return part


def queue_weight_gradients(held: GPT, queue: WgradQueue) -> None:
    """Every linear layer puts its weight gradient into the queue."""
    single = Axis.single("tp")
    for name, module in list(held.named_modules()):
        if isinstance(module, Linear):
            new = ColumnParallelLinear(0, 0, axis=single, bias=False, weight=module.weight)
            new.bias = module.bias
            parent, _, leaf = name.rpartition(".")
            setattr(held.get_submodule(parent), leaf, new)
    for module in held.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.wgrads = queue


def hidden_step(stage: nn.Module, batch: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
    """A stage that is not the last: [batch, seq, hidden] or this rank's piece of the sequence."""
    return stage(
        batch["tokens"],
        position_ids=batch.get("position_ids"),
        document_ids=batch.get("document_ids"),
        hidden=hidden,
    )

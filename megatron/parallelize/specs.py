"""Shards of the parameters on one rank, made from the parameter table and the rank's place in the layout."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import ConfigError
from megatron.model.init import initial_elements
from megatron.model.parameters import WORD_TABLE, Parameter, Row, Shape, stored_shape
from megatron.state.division import Range, common, even_ranges
from megatron.state.shard import Shard, element_runs, split_size


@dataclass(frozen=True)
class Held:
    """Layers and experts that one rank holds, and whether it holds the embedding (`first`) and the head (`last`)."""

    layers: tuple[int, ...]
    experts: range
    first: bool = True
    last: bool = True

    def has(self, parameter: Parameter, *, tied: bool) -> bool:
        if parameter.layer is not None:
            return parameter.layer in self.layers and (parameter.expert is None or parameter.expert in self.experts)
        if parameter.name.startswith("embedding."):
            return self.first or (self.last and tied and parameter.name == WORD_TABLE)
        return self.last


@dataclass(frozen=True)
class Cut:
    """Turns a row of the parameter table into the shard of one tensor-parallel rank."""

    tp: Axis
    padded_vocab_size: int
    sequence_parallel: bool = False

    def spec(self, parameter: Parameter) -> Shard:
        row = parameter.row
        fold = row.fold if self.tp.size > 1 else 1  # an unsplit parameter keeps its own dimensions
        spec = Shard(name=parameter.name, logical_shape=row.shape, dim=row.split_dim or 0, fold=fold)
        return replace(part := self._part(row, spec), stored=self.stored_shape(row, part))

    def _part(self, row: Row, spec: Shard) -> Shard:
        if self.tp.size == 1:
            return spec
        if row.split_dim is None:
            summed = ("tp",) if row.trained and (row.after_split or self.sequence_parallel) else ()
            return replace(spec, replica_axes=summed, copies=((0, split_size(spec)),) if self.tp.rank else ())
        if row.kind == "vocabulary":
            return replace(spec, ranges=self._vocabulary(split_size(spec)))
        if row.fold == 2:
            return self._query_key_value(spec)
        if row.kind == "heads" and split_size(spec) < self.tp.size:
            return self._shared_head(spec)
        return replace(spec, ranges=even_ranges(split_size(spec), self.tp.size, self.tp.rank))

    def stored_shape(self, row: Row, spec: Shard) -> Shape:
        """The shape of the shard in memory: a vocabulary table includes its share of the padding rows."""
        if row.kind == "vocabulary":
            return self.padded_vocab_size // self.tp.size, row.shape[1]
        # In `local_shape`, the folded dimensions are one dimension. They are stored as rows if rows are split.
        folded = spec.fold - 1 if row.split_dim is not None and row.split_dim < row.row_dims else 0
        return stored_shape(spec.local_shape, row.row_dims - folded)

    def _vocabulary(self, size: int) -> tuple[Range, ...]:
        """Range of this rank's rows: an equal share of the padded table. Padding is at the end, so the last ranks may
        hold few or no rows of real tokens."""
        rows = self.padded_vocab_size // self.tp.size
        start = min(self.tp.rank * rows, size)
        return ((start, min(start + rows, size)),)

    def _query_key_value(self, spec: Shard) -> Shard:
        """Part of a fused QKV weight: whole KV groups. If there are fewer groups than ranks: some query heads of one
        group, and a replica of the key head and value head of that group."""
        tp, (groups, per_group) = self.tp, spec.logical_shape[:2]
        if groups % tp.size == 0:
            return replace(spec, ranges=even_ranges(split_size(spec), tp.size, tp.rank))
        sharing = tp.size // groups  # ranks that share a group
        group, place = divmod(tp.rank, sharing)
        first, queries = group * per_group, (per_group - 2) // sharing
        own = (first + place * queries, first + (place + 1) * queries)
        shared = (first + per_group - 2, first + per_group)
        return replace(spec, ranges=(own, shared), replica_axes=("tp",), copies=(shared,) if place else ())

    def _shared_head(self, spec: Shard) -> Shard:
        """Part of a vector with one slice per key/value head, if there are fewer heads than ranks: the slice of one
        head. The ranks of one head hold replicas."""
        head, place = divmod(self.tp.rank, self.tp.size // split_size(spec))
        own = ((head, head + 1),)
        return replace(spec, ranges=own, replica_axes=("tp",), copies=own if place else ())


def split_axes(state: ParallelState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes that dense parameters are split over, and the axes of expert parameters."""
    dense = ("model",) if state.model.size > 1 else ()
    return dense, (*dense, "ep") if state.ep.size > 1 else dense


def held_specs(
    table: Mapping[str, Parameter], held: Held, cut: Cut, state: ParallelState, *, tied: bool
) -> dict[str, Shard]:
    """Returns name -> Shard of everything that a rank holds, in model order."""
    (dense, experts), pp = split_axes(state), state.pp
    specs = {
        name: replace(cut.spec(parameter), split_over=experts if parameter.row.kind == "expert" else dense)
        for name, parameter in table.items()
        if held.has(parameter, tied=tied)
    }
    if tied and pp.size > 1 and WORD_TABLE in specs:
        # The first and last stage hold replicas, whose gradients are summed.
        spec = specs[WORD_TABLE]
        copies = spec.held if pp.rank else spec.copies
        specs[WORD_TABLE] = replace(spec, replica_axes=(*spec.replica_axes, "embedding"), copies=copies)
    return specs


def in_order_of(model: nn.Module, specs: Mapping[str, Shard], *, all_there: bool = True) -> dict[str, Shard]:
    """Returns the specs in the order of the model's parameters and buffers. Asserts that each of these has a spec and,
    with `all_there`, that each spec has a parameter or buffer."""
    names = [*(name for name, _ in model.named_parameters()), *persistent_buffers(model)]
    apart = sorted(specs.keys() ^ set(names) if all_there else set(names) - specs.keys())
    assert not apart, f"only in the model or only in the table: {', '.join(apart)}"
    return {name: specs[name] for name in names}


def foreign_specs(model: nn.Module) -> dict[str, Shard]:
    """Returns the specs of a foreign model: every tensor is unsplit, with its own shape as the logical view."""
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: Shard(name, shape := tuple(tensor.shape), stored=shape) for name, tensor in tensors.items()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers in a model's state dict, such as running means or a router's bias.

    Raises on state that is not a tensor, because a checkpoint would omit it.
    """
    state = model.state_dict(keep_vars=True)
    foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if foreign:
        raise ConfigError(
            f"the model keeps state that is not a tensor ({', '.join(foreign)}), which a checkpoint cannot hold; "
            "register it as a buffer instead of using get_extra_state"
        )
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


Part = tuple[Shard, Tensor, torch.dtype]
"""A rank's part of a parameter: (Shard, elements in one dimension, dtype of the model's copy)."""


def whole_parts(model: nn.Module, specs: Mapping[str, Shard]) -> Iterator[Part]:
    """Yields all parameters, for models without sharded weights."""
    for name, parameter in model.named_parameters():
        yield specs[name], parameter.detach().view(-1), parameter.dtype


@torch.no_grad()
def initialise_part(parts: Iterable[Part], table: Mapping[str, Parameter], seed: int) -> None:
    """Sets a rank's parts to their slices of the initial values."""
    for shard, elements, dtype in parts:
        runs = _runs_kept(shard, elements)
        drawn = sum(count for _, count in runs)
        elements[drawn:].zero_()  # padding rows of the vocabulary
        if drawn:
            elements[:drawn].copy_(initial_elements(table[shard.name], runs, seed).to(dtype))


@torch.no_grad()
def await_weights(parts: Iterable[Part]) -> None:
    """Fills parameters with NaN before a checkpoint is loaded, so that a parameter that was not loaded is noticed."""
    for shard, elements, _ in parts:
        drawn = sum(count for _, count in _runs_kept(shard, elements))
        elements[:drawn].fill_(float("nan"))
        elements[drawn:].zero_()


def _runs_kept(shard: Shard, elements: Tensor) -> list[tuple[int, int]]:
    """Ranges of the whole logical view that this rank keeps, as (first element, number of elements)."""
    kept = shard.division.held if shard.division is not None else (0, elements.numel())
    runs, position = [], 0
    for first, count in element_runs(shard):
        start, stop = common((position, position + count), kept)
        if start < stop:
            runs.append((first + start - position, stop - start))
        position += count
    return runs

"""Sorts the rows of tokens by expert, and back. No size depends on values of the device, so nothing waits for it.

A token has `per` choices of an expert; choice c belongs to token c // per. Two arrays describe an order:

    source [rows]      the choice that each row belongs to; -1 for padding, which is a row of zeros
    place [choices]    the row of each choice; -1 for a choice that its expert does not accept

`taken` moves tokens to the experts, and `weighted_sum` brings results back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.ops.operation import (
    Native,
    Operation,
    described,
    register_shapes,
    unsupported_devices,
    unsupported_floats,
    without_derivative,
)


class RowGroups:
    """Row counts of consecutive groups, on the device. The host reads them if it needs them."""

    def __init__(self, counts: Tensor, rows: int, on_host: Sequence[int] | None = None, *, fixed: bool = False) -> None:
        """`counts` [groups]: rows of each group; `rows`: of all groups. `on_host`: the counts, if the host knows them.
        `fixed`: they depend on settings alone, so all ranks have the same."""
        self.counts, self.rows, self.fixed = counts, rows, fixed
        if on_host is not None:
            self.on_host = list(on_host)

    @cached_property
    def on_host(self) -> list[int]:
        """Row counts on the host. Unless the host knows them, the first use waits for the device."""
        counts: list[int] = self.counts.tolist()
        return counts

    @cached_property
    def ends(self) -> Tensor:
        """Index after the last row of each group, [groups] int32."""
        return self.counts.cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class ByExpert:
    """Rows of choices, sorted by expert."""

    source: Tensor
    place: Tensor
    groups: RowGroups
    has_padding: bool = False
    drops: bool = False

    @property
    def back(self) -> "ByExpert":
        """The opposite order: `taken` with it undoes `taken` with this one."""
        return replace(self, source=self.place, place=self.source, has_padding=self.drops, drops=self.has_padding)


def by_expert(
    chosen: Tensor,
    experts: int,
    padding: int,
    on_host: Sequence[int] | None = None,
    accepted: Tensor | None = None,
) -> ByExpert:
    """Sorts choices by expert. An expert's choices keep their order.

    The expert of each choice is `chosen` [choices]. Each expert gets `padding` rows of zeros after its last row. If the
    host knows the number of choices of each expert, `on_host` has these. Choices that are False in `accepted` get no
    row. The host then waits for the number of rows.
    """
    every = torch.arange(experts, device=chosen.device)
    choices = chosen.numel()
    keys = chosen if accepted is None else torch.where(accepted, chosen, experts)
    if padding:
        keys = torch.cat([keys, every.repeat(padding)])
    order = keys.argsort(stable=True)
    if accepted is not None:
        order = order[: int(accepted.sum()) + padding * experts]  # choices without a row come last
    ends = torch.searchsorted(keys[order], every, right=True)  # bincount would wait for the device
    known = None if on_host is None else [count + padding for count in on_host]
    groups = RowGroups(ends.diff(prepend=ends.new_zeros(1)), len(order), known)
    source = torch.where(order < choices, order, -1) if padding else order
    return ByExpert(source, places(source, choices), groups, has_padding=padding > 0, drops=accepted is not None)


def within_buffers(chosen: Tensor, accepted: Tensor, experts: int, capacity: int) -> ByExpert:
    """Sorts choices by expert into buffers: one of `capacity` rows for each expert and sequence. Unused rows, at the
    end of a buffer, are padding.

    `chosen` [sequences, choices]: expert of each choice. `accepted`: False for choices without a row; True for at most
    `capacity` choices of an expert in a sequence.
    """
    sequences, choices = chosen.shape
    keys = torch.where(accepted, chosen, experts)  # choices without a row come last
    order = keys.argsort(dim=1, stable=True)
    keys = keys.gather(1, order)
    every = torch.arange(experts, device=chosen.device).expand(sequences, -1).contiguous()
    starts, ends = torch.searchsorted(keys, every), torch.searchsorted(keys, every, right=True)
    index = starts.unsqueeze(2) + torch.arange(capacity, device=chosen.device)  # [sequences, experts, capacity]
    used = index < ends.unsqueeze(2)
    order = order + choices * torch.arange(sequences, device=chosen.device).unsqueeze(1)
    source = order.gather(1, index.clamp(max=choices - 1).flatten(1)).view(index.shape)
    source = torch.where(used, source, -1).transpose(0, 1).flatten()
    each = sequences * capacity
    counts = torch.full((experts,), each, device=chosen.device)
    groups = RowGroups(counts, experts * each, [each] * experts, fixed=True)
    return ByExpert(source, places(source, chosen.numel()), groups, has_padding=True, drops=True)


def places(source: Tensor, choices: int) -> Tensor:
    """Returns the row of each choice, or -1."""
    place = torch.full((choices + 1,), -1, device=source.device)  # the last one takes the rows of padding
    rows = torch.arange(len(source), device=source.device)
    return place.scatter_(0, torch.where(source < 0, choices, source), rows)[:choices]


def taken(x: Tensor, order: ByExpert, per: int = 1) -> Tensor:
    """Returns the rows of `order`: x [tokens, width] -> [rows, width]. Backward adds up the gradients of a token's
    choices in a fixed order, so it is deterministic."""
    return _Taken.apply(x, order.source, order.place, per, order.has_padding, order.drops)


def weighted_sum(rows: Tensor, order: ByExpert, weights: Tensor) -> Tensor:
    """Returns the weighted sum of the rows of each token's choices: rows [rows, width], weights [tokens, per] ->
    [tokens, width]."""
    of_choices = taken(rows, order.back).unflatten(0, weights.shape)
    return torch.bmm(weights.unsqueeze(1), of_choices).squeeze(1)


class _Taken(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor, per: int, has_padding: bool, drops: bool) -> Tensor:
        ctx.save_for_backward(place)
        ctx.per, ctx.drops = per, drops
        return _rows(x, source // per if per > 1 else source, has_padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        rows = _rows(grad, place, ctx.drops)
        dx = rows.view(-1, ctx.per, rows.shape[1]).sum(1) if ctx.per > 1 else rows
        return dx, None, None, None, None, None


def _rows(x: Tensor, index: Tensor, some_missing: bool) -> Tensor:
    """x[index]; an index of -1 gives a row of zeros."""
    return (F.pad(x, (0, 0, 0, 1)) if some_missing else x)[index]


# ---------------------------------------------------------------- the kernels of csrc/
# They neither copy x to append a row of zeros nor write gathered rows before they add them up.


def register(namespace: str) -> None:
    register_shapes(
        namespace,
        take_rows=lambda x, source, per, weights: x.new_empty((source.shape[0], x.shape[1])),
        sum_rows=lambda rows, place, per, weights: rows.new_empty((place.shape[0] // per, rows.shape[1])),
        row_products=lambda rows, place, dy, per: rows.new_empty(place.shape),
    )
    without_derivative(namespace, "take_rows", "sum_rows", "row_products")


class _NativeTaken(Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, order: ByExpert, per: int) -> Tensor:
        ctx.ops, ctx.order, ctx.per = ops, order, per
        return ops.take_rows(x.contiguous(), order.source, per, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.ops.sum_rows(dy.contiguous(), ctx.order.place, ctx.per, None), None, None


class _NativeWeightedSum(Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, rows: Tensor, order: ByExpert, weights: Tensor) -> Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.save_for_backward(rows, weights)
        ctx.ops, ctx.order = ops, order
        return ops.sum_rows(rows, order.place, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, Tensor | None]:
        (rows, weights), ops, order, dy = ctx.saved_tensors, ctx.ops, ctx.order, dy.contiguous()
        per, (_, wants_rows, _, wants_weights) = weights.shape[1], ctx.needs_input_grad
        of_rows = ops.take_rows(dy, order.source, per, weights) if wants_rows else None
        of_weights = ops.row_products(rows, order.place, dy, per).view_as(weights) if wants_weights else None
        return None, of_rows, None, of_weights


def _native_taken(ops: Any, x: Tensor, order: ByExpert, per: int = 1) -> Tensor:
    return _NativeTaken.apply(ops, x, order, per)


def _native_weighted_sum(ops: Any, rows: Tensor, order: ByExpert, weights: Tensor) -> Tensor:
    return _NativeWeightedSum.apply(ops, rows, order, weights)


def _unsupported_taken(x: Tensor, order: ByExpert, per: int = 1) -> str | None:
    if x.dim() != 2 or x.shape[0] * per != order.place.shape[0]:
        choices = f"{order.place.shape[0]} choices, {per} of a token"
        return f"x {described(x)} with {choices}: the kernel needs [tokens, width] with all choices of all tokens"
    return unsupported_floats(x) or unsupported_devices(x, order.source, order.place)


def _unsupported_sum(rows: Tensor, order: ByExpert, weights: Tensor) -> str | None:
    fits = rows.dim() == weights.dim() == 2 and len(rows) == len(order.source)
    if not fits or weights.numel() != len(order.place):
        given = f"rows {described(rows)} with weights {described(weights)}"
        needed = f"[{len(order.source)}, width] with [tokens, per] of {len(order.place)} choices"
        return f"{given}: the kernel needs {needed}"
    if weights.dtype != rows.dtype:
        return f"rows {described(rows)} with weights {described(weights)}: the kernel needs one dtype"
    return unsupported_floats(rows, weights) or unsupported_devices(rows, weights, order.source, order.place)


OPERATIONS = (
    Operation("taken", taken, native=Native("expert_rows", _native_taken, _unsupported_taken)),
    Operation("weighted_sum", weighted_sum, native=Native("expert_rows", _native_weighted_sum, _unsupported_sum)),
)

"""Linear layers split over the tensor-parallel ranks: by output features (column) or by input features (row).

    hidden = ColumnParallelLinear(width, 4 * width, axis=state.tp)(x)      # each rank: its features
    y = RowParallelLinear(4 * width, width, axis=state.tp)(hidden)         # each rank: all features

With `sequence_parallel`, x and y are this rank's piece [batch, seq / ranks, width] of the sequence.
"""

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.model.linear import Linear
from megatron.model.wgrads import Put, WgradRoute, flat
from megatron.ops.linear import linear
from megatron.tensor_parallel import mappings
from megatron.tensor_parallel.mappings import SEQUENCE


class _ParallelLinear(Linear):
    """Linear layer that holds one shard of the weight, and the axis over which the weight is split."""

    splits: Literal["input", "output"]
    """The features that are split: those of the input or of the output."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Axis,
        bias: bool = True,
        sequence_parallel: bool = False,
        local_features: int | None = None,
        wgrads: WgradRoute | None = None,
    ) -> None:
        """`in_features` and `out_features` count the whole layer. `local_features`: this rank's share of the split
        features, if shares are unequal."""
        whole = in_features if self.splits == "input" else out_features
        if local_features is None and whole % axis.size:
            raise ValueError(
                f"{whole} {self.splits} features are not divisible by the {axis.size} ranks of the {axis.name} axis"
            )
        local = whole // axis.size if local_features is None else local_features
        shape = (local, out_features) if self.splits == "input" else (in_features, local)
        super().__init__(*shape, bias=bias, wgrads=wgrads)
        self.axis, self.sequence_parallel = axis, sequence_parallel

    @property
    def sends_products(self) -> bool:
        return self.wgrads is not None and self.wgrads.connected

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1 and not self.sends_products:
            return F.linear(x, self.weight, self.bias)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.splits} features split over {self.axis.size} ranks"


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer that computes a part of the output features. It holds the rows of the weight and the elements of the
    bias for these features."""

    splits = "output"

    def product(self, x: Tensor) -> Tensor:
        if self.packed is not None and not self.sequence_parallel and not torch.is_grad_enabled():
            return self.packed(x, self.bias)
        return _linear(x, self.weight, self.bias, self.axis, self.sequence_parallel, self.wgrads)


class RowParallelLinear(_ParallelLinear):
    """Linear layer that takes a part of the input features and holds their columns of the weight. The bias is whole,
    and is added after the sum over the ranks."""

    splits = "input"

    def product(self, x: Tensor) -> Tensor:
        if self.sends_products:
            parts = _linear(x, self.weight, None, Axis.single("tp"), False, self.wgrads)
        elif self.packed is not None and not torch.is_grad_enabled():
            parts = self.packed(x, None)
        else:
            parts = F.linear(x, self.weight)  # [batch, seq, out_features], to be summed
        y = (mappings.scattered if self.sequence_parallel else mappings.summed)(parts, self.axis)
        return y if self.bias is None else y + self.bias


def _linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, axis: Axis, sequence_parallel: bool, wgrads: WgradRoute | None
) -> Tensor:
    if wgrads is None or not wgrads.takes(x, weight):
        return _Linear.apply(x, weight, bias, axis, sequence_parallel, None)
    # Detached: the weight's gradient goes to `wgrads`, and autograd must not compute it as well.
    return _Linear.apply(x, weight.detach(), bias, axis, sequence_parallel, partial(wgrads.put, weight))


class _Linear(Function):
    """Linear layer whose backward overlaps the communication of the input's gradient with the weight-gradient product.
    If `put` is given, it receives the factors of that product, and autograd gets no gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence_parallel: bool, put: Put | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # under sequence parallelism, x is this rank's piece
        ctx.axis, ctx.sequence_parallel, ctx.has_bias = axis, sequence_parallel, bias is not None
        ctx.put = put
        whole = collectives.gather_along(x, axis, SEQUENCE) if sequence_parallel else x
        return linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis: Axis = ctx.axis
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_weight = needs_weight or ctx.put is not None
        arriving = leaving = None
        if ctx.sequence_parallel and needs_weight:
            arriving = collectives.start_gather_along(x, axis, SEQUENCE)
        if needs_x:
            grad_x = grad @ weight  # [batch, seq, in]
            if ctx.sequence_parallel:
                leaving = collectives.start_scatter_sum(grad_x, axis, SEQUENCE)
            else:
                leaving = collectives.start_all_reduce(grad_x, axis)
        grad_weight = None
        if needs_weight:
            factors = flat(grad), flat(x if arriving is None else arriving.wait())
            if ctx.put is None:
                grad_weight = factors[0].t() @ factors[1]
            else:
                ctx.put(*factors)
        grad_bias = flat(grad).sum(0) if ctx.has_bias and needs_bias else None
        return None if leaving is None else leaving.wait(), grad_weight, grad_bias, None, None, None

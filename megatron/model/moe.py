"""Mixture of experts: a router sends every token to a few of many MLPs and adds up their weighted results:

    y = sum over the chosen experts of p * expert(x)   + shared expert(x)

`MoE` sorts tokens by expert, so each expert multiplies one contiguous slice (`ops/grouped_linear.py`). The dispatcher
calls the experts, or first moves tokens to the experts' ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.factory import ModuleFactory
from megatron.model.mlp import MLP
from megatron.model.parameters import EXPERT, SHARED_EXPERT
from megatron.model.router import Router, Routing


class Experts(nn.ModuleDict):
    """This rank's experts, keyed by their number in the whole layer. Their matrix products are grouped."""

    def __init__(self, make: ModuleFactory, layer: int) -> None:
        width = make.moe.moe_ffn_hidden_size or make.config.ffn_size
        names = {number: EXPERT.format(layer=layer, expert=number) for number in make.experts()}
        super().__init__({str(number): MLP(make, name, width) for number, name in names.items()})
        self.kernels = make.kernels
        self.put_weight_gradient = make.wgrads.put if make.wgrads.deferred else None

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Applies the experts to rows [tokens, hidden], sorted by expert; counts: the rows per expert. An expert
        without rows gets a gradient of zero, not None."""
        experts = [expert for expert in self.values() if isinstance(expert, MLP)]
        inner = self._linear(rows, counts, [expert.dense_h_to_4h.weight for expert in experts])
        return self._linear(experts[0].activate(inner), counts, [expert.dense_4h_to_h.weight for expert in experts])

    def _linear(self, rows: Tensor, counts: Sequence[int], weights: Sequence[nn.Parameter]) -> Tensor:
        return self.kernels.grouped_linear(rows, counts, weights, self.put_weight_gradient)


class MoE(nn.Module):
    """The feed-forward half of a layer with experts."""

    def __init__(self, make: ModuleFactory, layer: int) -> None:
        super().__init__()
        shared = make.moe.moe_shared_expert_intermediate_size
        self.router = Router(make, layer)
        self.experts = Experts(make, layer)
        self.shared_expert = None if shared is None else MLP(make, SHARED_EXPERT.format(layer=layer), shared)
        self.dispatcher = make.dispatcher()
        self.num_experts = self.router.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        y = self._routed(x, routing)
        return y if self.shared_expert is None else y + self.shared_expert(x)  # [batch, seq, hidden]

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        topk, hidden = routing.experts.shape[-1], x.shape[-1]
        chosen = routing.experts.reshape(-1)  # [tokens * k]: choice c is of token c // k
        order = chosen.argsort(stable=True)
        if routing.kept is not None:
            order = order[routing.kept.reshape(-1)[order]]
        every = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(chosen[order], every, right=True)  # bincount would need a host sync
        counts = ends.diff(prepend=ends.new_zeros(1))
        rows = _Taken.apply(x.reshape(-1, hidden), order, topk)  # [choices, hidden], sorted by expert
        rows = self.dispatcher(rows, counts, self.experts)
        rows = _Placed.apply(rows, order, chosen.numel()).view(-1, topk, hidden)
        weights = routing.weights.reshape(-1, 1, topk)
        return torch.bmm(weights, rows).view(x.shape)


class _Taken(torch.autograd.Function):
    """[tokens, hidden] -> the rows of the choices `order`; choice c belongs to token c // k. Backward is deterministic:
    it adds the gradients of a token's choices in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.topk, ctx.tokens = topk, x.shape[0]
        return x[order // topk]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        placed = _placed(grad, order, ctx.tokens * ctx.topk)
        return placed.view(ctx.tokens, ctx.topk, -1).sum(1), None, None


class _Placed(torch.autograd.Function):
    """Scatters rows back to the places of their choices. A dropped choice gets a row of zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        return _placed(rows, order, choices)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def _placed(rows: Tensor, order: Tensor, choices: int) -> Tensor:
    return rows.new_zeros(choices, rows.shape[1]).index_copy_(0, order, rows)

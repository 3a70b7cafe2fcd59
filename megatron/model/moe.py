"""Mixture of experts: a router sends every token to a few of many MLPs and adds up their weighted results:

    y = sum over the chosen experts of p * expert(x)   + shared expert(x)

`MoE` sorts tokens by expert (`ops/expert_rows.py`). Each expert then multiplies one contiguous slice
(`ops/grouped_linear.py`). The dispatcher calls the experts, or first moves tokens to the experts' ranks.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.model.factory import ModuleFactory
from megatron.model.mlp import MLP
from megatron.model.parameters import EXPERT, SHARED_EXPERT
from megatron.model.router import Router, Routing
from megatron.ops.expert_rows import ByExpert, RowGroups, by_expert, within_buffers
from megatron.utils.device_kind import kind_of


class Experts(nn.ModuleDict):
    """This rank's experts, keyed by their number in the whole layer. Their matrix products are grouped."""

    def __init__(self, make: ModuleFactory, layer: int) -> None:
        width = make.moe.moe_ffn_hidden_size or make.config.ffn_size
        names = {number: EXPERT.format(layer=layer, expert=number) for number in make.experts()}
        super().__init__({str(number): MLP(make, name, width) for number, name in names.items()})
        self.kernels = make.kernels
        self.recomputation, self.recompute_activation = make.recomputation, "moe_act" in make.recompute.modules
        self.put_weight_gradient = make.wgrads.put if make.wgrads.deferred else None

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """Applies the experts to rows [rows, hidden], sorted by expert; groups: the rows of each expert. An expert
        without rows gets a gradient of zero, not None."""
        experts = [expert for expert in self.values() if isinstance(expert, MLP)]
        inner = self._linear(rows, groups, [expert.dense_h_to_4h.weight for expert in experts])
        hidden = experts[0].activate(inner)
        with self.recomputation.instead_of(hidden, lambda: experts[0].activate(inner), self.recompute_activation):
            return self._linear(hidden, groups, [expert.dense_4h_to_h.weight for expert in experts])

    def _linear(self, rows: Tensor, groups: RowGroups, weights: Sequence[nn.Parameter]) -> Tensor:
        return self.kernels.grouped_linear(rows, groups, weights, self.put_weight_gradient)


class MoE(nn.Module):
    """The feed-forward half of a layer with experts."""

    def __init__(self, make: ModuleFactory, layer: int) -> None:
        super().__init__()
        shared = make.moe.moe_shared_expert_intermediate_size
        self.router = Router(make, layer)
        self.experts = Experts(make, layer)
        self.shared_expert = None if shared is None else MLP(make, SHARED_EXPERT.format(layer=layer), shared)
        self.dispatcher = make.dispatcher()
        self.kernels = make.kernels
        self.num_experts = self.router.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        topk, hidden = routing.experts.shape[-1], x.shape[-1]
        order = self._by_expert(routing)
        rows = self.kernels.taken(x.reshape(-1, hidden), order, topk)  # [rows, hidden], sorted by expert
        rows, shared = self.dispatcher(rows, order.groups, self.experts, lambda: self._shared(x))
        y = self.kernels.weighted_sum(rows, order, routing.weights.reshape(-1, topk)).view(x.shape)
        return y if shared is None else y + shared  # [batch, seq, hidden]

    def _shared(self, x: Tensor) -> Tensor | None:
        return None if self.shared_expert is None else self.shared_expert(x)

    def _by_expert(self, routing: Routing) -> ByExpert:
        chosen, accepted = routing.experts.flatten(1), routing.accepted  # [batch, seq * k]: choice c is of token c // k
        if accepted is None:
            return by_expert(chosen.flatten(), self.num_experts, self.dispatcher.padding)
        if not kind_of(chosen.device.type).asynchronous:  # reading a number costs less than computing unused rows
            padding = self.dispatcher.padding
            return by_expert(chosen.flatten(), self.num_experts, padding, accepted=accepted.flatten())
        capacity = self.router.capacity(routing.experts.shape[1])
        return within_buffers(chosen, accepted.flatten(1), self.num_experts, capacity)

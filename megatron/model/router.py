"""The router of a mixture of experts: chooses a few experts for each token, and their weights.

scores   s = softmax(logits) or sigmoid(logits)           [tokens, experts]
choice   the k largest s (+ bias)                         [tokens, k]
weights  softmax over the chosen logits; or the chosen s (pre-softmax); or the chosen sigmoid s over their sum
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import MoEConfig
from megatron.model.factory import ModuleFactory
from megatron.model.moe_losses import Watch, balance_loss, z_loss


@dataclass(frozen=True)
class Routing:
    """The chosen experts and their weights, both [batch, seq, k]."""

    experts: Tensor
    weights: Tensor
    accepted: Tensor | None = None
    """[batch, seq, k]: False for choices beyond the expert's capacity. None if experts have no capacity."""


class Router(nn.Module):
    """Router of one layer. `expert_bias` affects the choice, not the weights. It is state that training updates, not a
    parameter."""

    expert_bias: Tensor | None

    def __init__(self, make: ModuleFactory, layer: int) -> None:
        super().__init__()
        config, reports = make.moe, make.routers
        assert config.num_experts is not None and reports is not None
        self.weight = nn.Parameter(torch.empty(config.num_experts, make.config.hidden_size))
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.layer, self.config, self.reports = layer, config, reports
        self.sum_of_sequence = make.sum_of_sequence

    def forward(self, x: Tensor) -> Routing:
        logits = self._logits(x)  # [batch, seq, experts]
        scores = logits.softmax(-1) if self._softmax else logits.sigmoid()
        biased = scores.detach() if self.expert_bias is None else scores.detach() + self.expert_bias
        choosable = within_groups(biased, self.config)
        experts = choosable.topk(self.config.moe_router_topk, dim=-1).indices  # [batch, seq, k]
        weights = self._weights(logits, scores, experts)
        if self.training and torch.is_grad_enabled() and self.reports.wanted:
            weights = self._watched(weights, logits, scores, experts)
        accepted = None
        if self.config.moe_expert_capacity_factor is not None:
            accepted = within_capacity(experts, weights.detach(), self.capacity(x.shape[1]), self.config)
        return Routing(experts, weights.to(x.dtype), accepted)

    @property
    def _softmax(self) -> bool:
        return self.config.moe_router_score_function == "softmax"

    def _logits(self, x: Tensor) -> Tensor:
        if self.config.moe_router_dtype is None:
            logits = F.linear(x, self.weight)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        wanted = torch.float64 if self.config.moe_router_dtype == "fp64" else torch.float32
        dtype = torch.promote_types(x.dtype, wanted)
        return F.linear(x.to(dtype), self.weight.to(dtype))

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        factor = self.config.moe_router_topk_scaling_factor or 1.0
        if self._softmax and not self.config.moe_router_pre_softmax:
            return logits.gather(-1, experts).softmax(-1)  # = the chosen scores over their sum
        chosen = scores.gather(-1, experts)
        if not self._softmax and self.config.moe_router_topk > 1:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return chosen * factor if factor != 1.0 else chosen

    def _watched(self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Returns the weights with the router's losses attached to their backward pass."""
        config = self.config
        chosen = experts.flatten(1)
        counts = torch.zeros_like(chosen[:, :1]).repeat(1, scores.shape[-1])  # [batch, experts]: tokens that chose each
        counts.scatter_add_(1, chosen, torch.ones_like(chosen))
        losses: dict[str, Tensor] = {}
        if config.balances:
            shares = scores if self._softmax else scores / (scores.sum(-1, keepdim=True) + 1e-20)
            losses["load_balancing_loss"] = balance_loss(
                shares, self.sum_of_sequence(counts), config.moe_router_topk, self.reports.pieces, config.balanced_over
            )
        if config.moe_z_loss_coeff:
            losses["z_loss"] = z_loss(logits, self.reports.pieces)
        return self.reports.attach(weights, Watch(self.layer, counts.sum(0)), losses)

    def capacity(self, seq: int) -> int:
        """Choices that an expert accepts from a sequence of that length."""
        factor, experts = self.config.moe_expert_capacity_factor, self.weight.shape[0]
        assert factor is not None
        return math.ceil(seq * self.config.moe_router_topk / experts * factor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keeps the bias in fp32, because its steps are too small for half precision."""
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()
        return self

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]} experts, top {self.config.moe_router_topk}"


@torch.no_grad()
def within_groups(scores: Tensor, config: MoEConfig) -> Tensor:
    """Returns the scores [..., experts] with -inf for experts outside the token's groups. The chosen groups have the
    largest sum of their best topk / group_topk scores."""
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is None or chosen is None:
        return scores
    grouped = scores.unflatten(-1, (groups, -1))  # [..., groups, experts of each]
    best = grouped.topk(config.moe_router_topk // chosen, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    closed = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
    return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)


@torch.no_grad()
def within_capacity(experts: Tensor, weights: Tensor, capacity: int, config: MoEConfig) -> Tensor:
    """Returns [batch, seq, k]: True for the choices that an expert accepts, at most `capacity` per expert and
    sequence: those of largest weight, or the first. Sequences are independent, so batch and layout do not matter."""
    batch, seq, topk = experts.shape
    chosen, weights = experts.reshape(batch, seq * topk), weights.reshape(batch, seq * topk)
    if config.moe_token_drop_policy == "probs":
        order = weights.argsort(dim=1, descending=True, stable=True)
    else:
        order = torch.arange(seq * topk, device=experts.device).expand(batch, -1)
    order = order.gather(1, chosen.gather(1, order).argsort(dim=1, stable=True))  # by expert, best first
    ranked = chosen.gather(1, order)
    steps = torch.arange(seq * topk, device=experts.device).expand(batch, -1).contiguous()
    first = torch.searchsorted(ranked, ranked)  # index at which the choices of the same expert begin
    kept = torch.empty_like(chosen, dtype=torch.bool).scatter_(1, order, steps - first < capacity)
    return kept.view(batch, seq, topk)

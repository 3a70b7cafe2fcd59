"""Auxiliary losses of routers (load balancing, z-loss), and the statistics that they report.

The objective is

    mean loss of the counted tokens + coefficient * (mean over the sequences of their router losses, summed over layers)

whatever the micro-batch size and the layout. The tokens' loss comes out of the model; a router's loss would have to
travel through all layers and stages after it. Instead its gradient joins that of the router's weights where it arises
(`RouterReports.attach`), times a scale that the engine sets for every step, so that both are divided by the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.config import MoEConfig


def balance_loss(
    shares: Tensor, counts: Tensor, topk: int, pieces: int, over: Literal["sequence", "micro-batch"]
) -> Tensor:
    """sum over experts of (part of the choices that it got) * (mean share of the scores) * experts: 1 if even.

    shares [batch, seq, experts] of the tokens that are here, one of `pieces` of their sequences; counts
    [batch, experts] of whole sequences. This rank's share of the sum over the batch's sequences.
    """
    _, seq, experts = shares.shape
    tokens = seq * pieces
    got, shared = counts.to(shares.dtype), shares.sum(1)  # [batch, experts]
    if over == "micro-batch":
        got, shared = got.mean(0, keepdim=True), shared.sum(0, keepdim=True)
    return (got * shared).sum() * (experts / (topk * tokens * tokens))


def z_loss(logits: Tensor, pieces: int) -> Tensor:
    """Mean over a sequence's tokens of log(sum(exp(logits)))^2: keeps logits small. This rank's share of the sum
    over the batch's sequences."""
    return logits.logsumexp(-1).square().sum() / (logits.shape[1] * pieces)


@dataclass(frozen=True)
class Watch:
    """One router's statistics of one micro-batch."""

    layer: int
    counts: Tensor  # [experts]: how many of the tokens here chose each


@dataclass
class RouterReports:
    """Collects losses and counts from all routers of one model; the engine sets the scale and reads the sums."""

    config: MoEConfig
    num_layers: int
    pieces: int = 1
    """How many ranks each sequence is split over."""
    scale: Tensor | float = 1.0
    """What a router loss's gradient is multiplied by; set before every step."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Sums over this step's sequences and the layers here, without coefficients."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """layer -> how many of this step's tokens chose each expert."""

    @property
    def wanted(self) -> bool:
        return bool(self.has_losses or self.config.moe_router_enable_expert_bias)

    @property
    def has_losses(self) -> bool:
        return self.config.balances or bool(self.config.moe_z_loss_coeff)

    @property
    def coefficients(self) -> dict[str, float]:
        balance = self.config.moe_aux_loss_coeff if self.config.balances else 0.0
        return {"load_balancing_loss": balance, "z_loss": self.config.moe_z_loss_coeff or 0.0}

    def begin(self, scale: Tensor | float) -> None:
        """Starts a step: sets the scale and clears the sums."""
        self.scale = scale
        self.losses.clear()
        self.counts.clear()

    def attach(self, weights: Tensor, watch: Watch, losses: Mapping[str, Tensor]) -> Tensor:
        """Returns `weights` unchanged, with the losses attached: backward through them adds the losses' gradients."""
        return _Attached.apply(weights, self, watch, tuple(losses), *losses.values())

    def add(self, watch: Watch, losses: Mapping[str, Tensor]) -> None:
        for name, loss in losses.items():
            self.losses[name] = self.losses[name] + loss if name in self.losses else loss
        before = self.counts.get(watch.layer)
        self.counts[watch.layer] = watch.counts if before is None else before + watch.counts


class _Attached(torch.autograd.Function):
    """Reports in backward, which runs once, and not in forward, which recomputation runs twice."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, reports: RouterReports, watch: Watch, names: tuple[str, ...], *losses: Tensor
    ) -> Tensor:
        ctx.reports, ctx.watch = reports, watch
        ctx.losses = {name: loss.detach() for name, loss in zip(names, losses, strict=True)}
        return weights.view_as(weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        reports: RouterReports = ctx.reports
        reports.add(ctx.watch, ctx.losses)
        coefficients = reports.coefficients
        gradients = [
            torch.as_tensor(reports.scale * coefficients[name], dtype=loss.dtype, device=loss.device)
            for name, loss in ctx.losses.items()
        ]
        return grad, None, None, None, *gradients

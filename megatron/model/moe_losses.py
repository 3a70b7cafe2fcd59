"""Auxiliary losses of routers (load balancing, z-loss), and the statistics that they report.

For every micro-batch size and layout, the objective is

    mean loss of the counted tokens + coefficient * (mean over sequences of the router losses, summed over layers)

A router's loss is not passed through the later layers and stages to the output. `RouterReports.attach` adds its
gradient, times a scale that the engine sets for every step, to the gradient of the router's weights. The scale gives
both terms the same divisor.
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
    """Returns this rank's part of the sum over sequences of the load-balance loss. The loss is 1 if the load is even.

        loss = experts * sum over experts of (the expert's share of the choices) * (its mean share of the scores)

    Input `shares` [batch, seq, experts] covers this rank's tokens, one of `pieces` parts of their sequences. Input
    `counts` [batch, experts] covers whole sequences. The two shares are averaged over each sequence or, by `over`,
    over the micro-batch.
    """
    _, seq, experts = shares.shape
    tokens = seq * pieces
    got, shared = counts.to(shares.dtype), shares.sum(1)  # [batch, experts]
    if over == "micro-batch":
        got, shared = got.mean(0, keepdim=True), shared.sum(0, keepdim=True)
    return (got * shared).sum() * (experts / (topk * tokens * tokens))


def z_loss(logits: Tensor, pieces: int) -> Tensor:
    """Returns this rank's part of the sum over sequences of the mean over tokens of log(sum(exp(logits)))^2, with
    logits [batch, seq, experts]. This loss keeps logits small. `pieces`: as in `balance_loss`."""
    return logits.logsumexp(-1).square().sum() / (logits.shape[1] * pieces)


@dataclass(frozen=True)
class Watch:
    """One router's statistics of one micro-batch."""

    layer: int
    counts: Tensor  # [experts]: number of this rank's tokens that chose the expert


@dataclass
class RouterReports:
    """Collects losses and counts from all routers of one model. The engine sets the scale and reads the sums."""

    config: MoEConfig
    num_layers: int
    pieces: int = 1
    """Number of ranks that each sequence is split over."""
    scale: Tensor | float = 1.0
    """Factor on the gradient of router losses, set before every step."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Sums over this step's sequences and this rank's layers, without coefficients."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> number of this step's tokens that chose each expert."""

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
        """Returns `weights` unchanged; backward through them also adds the gradients of the losses."""
        return _Attached.apply(weights, self, watch, tuple(losses), *losses.values())

    def add(self, watch: Watch, losses: Mapping[str, Tensor]) -> None:
        for name, loss in losses.items():
            self.losses[name] = self.losses[name] + loss if name in self.losses else loss
        before = self.counts.get(watch.layer)
        self.counts[watch.layer] = watch.counts if before is None else before + watch.counts


class _Attached(torch.autograd.Function):
    """Adds the losses to the reports in backward, because recomputation runs forward twice."""

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

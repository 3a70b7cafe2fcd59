"""Handles expert routers in a training step: scales and reports their losses, and updates their biases."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.collectives import all_reduce
from megatron.distributed.parallel_state import ParallelState
from megatron.model.gpt import GPT
from megatron.model.moe import Router
from megatron.model.passes import shape_of


class RouterSteps:
    def __init__(self, model: GPT, parallel: ParallelState, device: torch.device) -> None:
        """`model`: this rank's part."""
        assert model.routers is not None, "a model without experts"
        self.reports, self.parallel, self.device = model.routers, parallel, device
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        # Without sequence parallelism, tensor-parallel ranks see the same tokens and report the same numbers.
        shared_by = parallel.cp.size * parallel.tp.size
        self._copies = 1 if self.reports.pieces == shared_by else parallel.tp.size
        self._layers = self.reports.config.expert_layers(self.reports.num_layers)

    @torch.no_grad()
    def begin(self, batches: Sequence[Mapping[str, Any]], *, batch_size: int, factor: float | Tensor) -> None:
        """Sets the scale of the routers' losses before the first pass. `factor` multiplies the sum of the tokens'
        losses. At the end of the step all gradients are divided by `factor` and by the number of counted tokens. A
        router's loss is a mean over sequences, not a sum over tokens. It is therefore multiplied by the number of
        counted tokens in advance."""
        scale: Tensor | float = 1.0
        if self.reports.has_losses:
            counted = torch.zeros((), dtype=torch.float64, device=self.device)
            for batch in batches:
                mask = batch.get("loss_mask")
                counted += mask.sum() if mask is not None else shape_of(batch).numel()
            scale = all_reduce(counted, self.parallel.dp_cp) * (factor / batch_size)
        self.reports.begin(scale)

    @torch.no_grad()
    def end(self, *, batch_size: int, updated: Tensor) -> dict[str, Tensor]:
        """Updates the routers' biases after an update (`updated` is 0 if it was skipped). Returns the means of their
        losses over sequences and layers, by name. A collective of all ranks."""
        config = self.reports.config
        if not self.reports.wanted:
            return {}
        names = [name for name, coefficient in self.reports.coefficients.items() if coefficient > 0.0]
        losses = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for place, name in enumerate(names):
            losses[place] = self.reports.losses.get(name, 0.0)
        assert config.num_experts is not None
        counts = torch.zeros(len(self._layers), config.num_experts, dtype=torch.float64, device=self.device)
        for layer, seen in self.reports.counts.items():
            counts[self._layers.index(layer)] = seen
        everybody = all_reduce(torch.cat([losses, counts.flatten()]), self.parallel.world) / self._copies
        losses, counts = everybody[: len(names)], everybody[len(names) :].view_as(counts)
        self._step_biases(counts, updated)
        return dict(zip(names, losses / (batch_size * len(self._layers)), strict=True))

    def _step_biases(self, counts: Tensor, updated: Tensor) -> None:
        """Lowers the bias of experts that got more tokens than the mean, and raises the bias of the other experts."""
        for router in self.routers:
            if router.expert_bias is not None:
                seen = counts[self._layers.index(router.layer)]
                step = self.reports.config.moe_router_bias_update_rate
                direction = (seen.mean() - seen).sign() * updated
                router.expert_bias += step * direction.to(router.expert_bias.dtype)

"""Passes of batches through a model: the types shared by pipelines, engine and users' scripts, and `SinglePass`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = Mapping[str, Any]
"""One micro-batch: tensors by name, such as "tokens" and "labels"."""


def shape_of(batch: Batch) -> torch.Size:
    """Shape [batch, seq] of the tokens, or of the positions on a pipeline stage that gets no tokens."""
    tokens: Tensor = batch["tokens"] if "tokens" in batch else batch["position_ids"]
    return tokens.shape


ForwardStep = Callable[[Any, Batch], tuple[Tensor, Tensor]]
"""(model, batch) -> (sum of the losses over the counted tokens, number of counted tokens), both 0-d tensors. In a
pipeline, `model` is the last stage, with its input already bound."""


class Passes(Protocol):
    """Runs micro-batches through the model. A rank that does not compute the loss (an earlier pipeline stage) returns
    None or an empty list."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Returns the result of the forward step: (sum of the losses, number of counted tokens)."""

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Accumulates the gradients of `factor` times the summed loss. Returns for each batch what `forward` returns.

        Calls `arm` once, when only the last batch's gradients are missing. After that, each gradient may be
        reduced when it is complete.
        """


class SinglePass:
    """Passes through a model that this rank holds entirely, one micro-batch after another."""

    def __init__(self, model: nn.Module, forward_step: ForwardStep) -> None:
        self.model, self.forward_step = model, forward_step

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = self.forward_step(self.model, batch)
        return loss_sum, torch.as_tensor(count, device=loss_sum.device)

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        results = []
        for index, batch in enumerate(batches):
            if index == len(batches) - 1:
                arm()
            loss_sum, count = self.forward_step(self.model, batch)
            (loss_sum * factor).backward()
            results.append((loss_sum.detach(), torch.as_tensor(count, device=loss_sum.device).detach()))
        return results

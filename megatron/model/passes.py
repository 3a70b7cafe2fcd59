"""How batches go through a model: the types that pipelines, the engine and users' scripts share, and the plain way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = Mapping[str, Any]
"""One micro-batch: tensors by name, such as "tokens" and "labels"."""


def shape_of(batch: Batch) -> torch.Size:
    """[batch, seq] of its tokens; in a pipeline's stage that gets none, of their positions."""
    tokens: Tensor = batch["tokens"] if "tokens" in batch else batch["position_ids"]
    return tokens.shape


ForwardStep = Callable[[Any, Batch], tuple[Tensor, Tensor]]
"""(model, batch) -> (sum of the losses over the counted tokens, number of counted tokens), both 0-d tensors. In a
pipeline `model` is the last stage, which already has its input."""


class Passes(Protocol):
    """Runs micro-batches through the model. A rank that does not compute the loss (an earlier pipeline stage) returns
    None or an empty list."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """(sum of the losses, number of counted tokens), as the forward step gives them."""

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Adds the gradients of `factor` times the summed loss of all batches, and returns what `forward` does of each.

        `arm` is called once, when only the last batch's gradients are still to come: from then on a gradient may be
        reduced as soon as it is complete.
        """


class SinglePass:
    """Passes through a model that is whole on this rank: one micro-batch after another."""

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

"""The token dispatcher of a rank that holds all experts: it calls them. (Others: megatron/expert_parallel.)"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

RunExperts = Callable[[Tensor, list[int]], Tensor]
"""(rows [tokens, hidden] sorted by expert, how many each expert gets) -> the experts' results in the same order."""


class LocalDispatcher(nn.Module):
    def forward(self, rows: Tensor, counts: Tensor, experts: RunExperts) -> Tensor:
        """rows [tokens, hidden], sorted by expert; counts [experts]. The experts' results, in the same order."""
        return experts(rows, counts.tolist())

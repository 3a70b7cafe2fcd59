"""The head and the loss over a vocabulary that is split over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.ops import Kernels
from megatron.ops.linear_cross_entropy import VocabularyPart, Workspace
from megatron.tensor_parallel import mappings
from megatron.tensor_parallel.linear import flat


class VocabParallelHead(nn.Module):
    """`HeadAndLoss` over a split vocabulary. `vocab_size` is the true size; padding rows are ignored."""

    def __init__(self, vocab_size: int, kernels: Kernels, *, axis: Axis, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.vocab_size, self.axis, self.sequence_parallel = vocab_size, axis, sequence_parallel
        self.kernels = kernels
        self.workspace = Workspace()

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """hidden [batch, seq (or a piece), hidden], weight [rows of this rank, hidden], labels [batch, seq] or None.

        Returns logits [batch, seq, vocabulary], or the loss [batch, seq] in fp32, the same on every rank.
        """
        enter = mappings.gathered if self.sequence_parallel else mappings.copied
        hidden = enter(hidden, self.axis)
        if labels is None:
            return self._logits(hidden, weight)
        part = VocabularyPart(self.axis.rank * weight.shape[0], self._reduce)
        loss = self.kernels.linear_cross_entropy(
            flat(hidden), weight, labels.reshape(-1), self.vocab_size, self.workspace, part
        )
        return loss.view(labels.shape)

    def _reduce(self, values: Tensor, how: Literal["max", "sum"]) -> None:
        collectives.all_reduce(values, self.axis, how)

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "logits of a split vocabulary have no gradient: ask for the loss"
        return collectives.gather_along(F.linear(hidden, weight), self.axis, 2)[..., : self.vocab_size]

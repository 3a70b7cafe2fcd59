"""Vocabulary split over the tensor-parallel ranks: token embedding, output head and loss."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.model.loss import HeadAndLoss
from megatron.model.table import Table
from megatron.ops import Kernels
from megatron.ops.linear_cross_entropy import VocabularyPart
from megatron.tensor_parallel import mappings
from megatron.tensor_parallel.linear import flat
from megatron.tensor_parallel.mappings import SEQUENCE


class VocabParallelTable(Table):
    """Looks up the ids in this rank's rows; other ids contribute zero to the sum over ranks."""

    def __init__(self, rows: int, width: int, *, axis: Axis, sequence_parallel: bool = False) -> None:
        """`rows`: number of rows on this rank."""
        super().__init__(rows, width)
        self.axis, self.sequence_parallel = axis, sequence_parallel

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, width], or this rank's piece of the sequence."""
        if self.axis.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.axis.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return (mappings.scattered if self.sequence_parallel else mappings.summed)(found, self.axis)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} rows of {self.axis.size} parts, {self.weight.shape[1]}"


class SequenceSlicedTable(Table):
    """Replicated table that looks up only this rank's piece of the sequence."""

    def __init__(self, rows: int, width: int, *, axis: Axis) -> None:
        super().__init__(rows, width)
        self.axis = axis

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(collectives.own_piece(ids, self.axis, SEQUENCE), self.weight)


class VocabParallelHead(HeadAndLoss):
    """`HeadAndLoss` over a split vocabulary. `vocab_size` is the true size; padding rows are ignored."""

    def __init__(self, vocab_size: int, kernels: Kernels, *, axis: Axis, sequence_parallel: bool = False) -> None:
        super().__init__(vocab_size, kernels)
        self.axis, self.sequence_parallel = axis, sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """hidden [batch, seq (or a piece), hidden], weight [rows of this rank, hidden], labels [batch, seq] or None.

        Returns logits [batch, seq, vocabulary], or the loss [batch, seq] in fp32, the same on every rank.
        """
        enter = mappings.gathered if self.sequence_parallel else mappings.copied
        hidden = enter(hidden, self.axis)
        if labels is None:
            assert not torch.is_grad_enabled(), "logits of a split vocabulary have no gradient; pass labels"
            logits = F.linear(hidden, weight) if self.packed is None else self.packed(hidden, None)
            return collectives.gather_along(logits, self.axis, 2)[..., : self.vocab_size]
        part = VocabularyPart(self.axis.rank * weight.shape[0], self._reduce)
        loss = self.kernels.linear_cross_entropy(
            flat(hidden), weight, labels.reshape(-1), self.vocab_size, self.workspace, part
        )
        return loss.view(labels.shape)

    def _reduce(self, values: Tensor, how: Literal["max", "sum"]) -> None:
        collectives.all_reduce(values, self.axis, how)

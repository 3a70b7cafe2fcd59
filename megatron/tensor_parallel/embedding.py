"""The vocabulary's table, split by rows over the tensor-parallel ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.model.table import Table
from megatron.tensor_parallel import mappings
from megatron.tensor_parallel.mappings import SEQUENCE


class VocabParallelTable(Table):
    """Each rank looks up the ids that are in its rows; the others contribute zero to the sum."""

    def __init__(self, rows: int, width: int, *, axis: Axis, sequence_parallel: bool = False) -> None:
        """`rows` are those of this rank."""
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
    """A replicated table that looks up only this rank's piece of the sequence."""

    def __init__(self, rows: int, width: int, *, axis: Axis) -> None:
        super().__init__(rows, width)
        self.axis = axis

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(collectives.own_piece(ids, self.axis, SEQUENCE), self.weight)

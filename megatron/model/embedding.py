"""Token ids (and learned positions) -> the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig

# (x, probability, training) -> x with dropout; parallel layouts pass their own, which draws from another stream.
Dropout = Callable[[Tensor, float, bool], Tensor]


class Table(nn.Module):
    """A lookup table whose weights are left for the initialisation by name."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)  # [...] -> [..., width]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Embedding(nn.Module):
    def __init__(self, config: ModelConfig, padded_vocab_size: int, dropout: Dropout) -> None:
        super().__init__()
        self.word_embeddings = Table(padded_vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.position_embeddings = Table(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = dropout
        self.hidden_dropout = config.hidden_dropout
        self.fp32_residual = config.fp32_residual_connection

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.word_embeddings(tokens)  # [batch, seq, hidden]
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids)
        if self.fp32_residual:
            hidden = hidden.float() if hidden.dtype != torch.float64 else hidden
        return self.dropout(hidden, self.hidden_dropout, self.training)


class HeadTable(nn.Module):
    """In place of the embedding on a last pipeline stage with a tied head: the same table under the same name, for
    the head alone."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.word_embeddings = table

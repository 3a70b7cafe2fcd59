"""Embedding layer: token ids (and learned positions) -> the residual stream."""

import torch
from torch import Tensor, nn

from megatron.model.factory import ModuleFactory


class Embedding(nn.Module):
    def __init__(self, make: ModuleFactory, padded_vocab_size: int) -> None:
        super().__init__()
        self.word_embeddings = make.vocabulary_table(padded_vocab_size)
        self.position_embeddings = make.position_table() if make.config.positions == "learned" else None
        self.dropout, self.hidden_dropout = make.dropout, make.config.hidden_dropout
        self.fp32_residual = make.config.fp32_residual_connection

    def forward(self, tokens: Tensor, position_ids: Tensor, words: Tensor | None = None) -> Tensor:
        """Returns [batch, seq, hidden]. `words`: the token embeddings, if they were looked up already."""
        hidden = self.word_embeddings(tokens) if words is None else words  # [batch, seq, hidden]
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids)
        if self.fp32_residual:
            hidden = hidden.float() if hidden.dtype != torch.float64 else hidden
        return self.dropout(hidden, self.hidden_dropout, self.training)


class TiedHead(nn.Module):
    """Holds a copy of the tied token embedding, under the embedding's name, on a last pipeline stage that is not also
    the first stage."""

    def __init__(self, make: ModuleFactory, padded_vocab_size: int) -> None:
        super().__init__()
        self.word_embeddings = make.vocabulary_table(padded_vocab_size)

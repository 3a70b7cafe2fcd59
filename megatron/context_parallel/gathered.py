"""All-gather attention: every rank gathers all keys and values, in one message per layer. This needs memory for all
keys and values."""

import torch
from torch import Tensor, nn

from megatron.context_parallel.sequence import by_rank, chunks_of, in_sequence
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.model.attention import CoreAttention
from megatron.model.attention_mask import Window, attention_mask
from megatron.ops.softmax import causal_mask

_SEQUENCE = 2  # the dimension of the sequence in [batch, heads, seq, d]


class GatheredAttention(nn.Module):
    """Computes attention of each of the rank's two chunks of queries to all keys up to the chunk's end, with the plain
    core attention."""

    def __init__(self, core: CoreAttention, cp: Axis, window: Window) -> None:
        super().__init__()
        self.core, self.cp, self.window = core, cp, window

    @staticmethod
    def visible(
        cp: Axis, tokens: int, window: Window, document_ids: Tensor | None, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        """Mask [batch or 1, 1, this rank's tokens, all tokens], or None if attention is only causal."""
        size = tokens // 2
        masks = []
        for chunk in chunks_of(cp.rank, cp.size):
            end = (chunk + 1) * size
            documents = None if document_ids is None else document_ids[:, :end]
            mask, _ = attention_mask(size, end, window=window, document_ids=documents, device=device)
            masks.append(mask)
        if all(mask is None for mask in masks):
            return None, True
        whole = [
            causal_mask(size, (chunk + 1) * size, device)[None, None] if mask is None else mask
            for mask, chunk in zip(masks, chunks_of(cp.rank, cp.size))
        ]
        return torch.cat([nn.functional.pad(mask, (0, tokens * cp.size - mask.shape[-1])) for mask in whole], 2), False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """query [batch, heads, seq / ranks, d]; key, value [batch, groups, seq / ranks, d]."""
        key, value = self._all(torch.stack((key, value))).unbind()
        size, results = query.shape[2] // 2, []
        for index, chunk in enumerate(chunks_of(self.cp.rank, self.cp.size)):
            rows, end = slice(index * size, (index + 1) * size), (chunk + 1) * size
            seen = None if mask is None else mask[:, :, rows, :end]
            results.append(self.core(query[:, :, rows], key[:, :, :end], value[:, :, :end], seen, causal))
        return torch.cat(results, _SEQUENCE)

    def _all(self, own: Tensor) -> Tensor:
        """Gathers [2, batch, groups, seq / ranks, d] of every rank to [2, batch, groups, seq, d], in the order of the
        sequence."""
        cp, dim = self.cp, 1 + _SEQUENCE
        return collectives.differentiable(
            own,
            lambda pieces: in_sequence(collectives.gather_along(pieces, cp, dim), cp.size, dim),
            lambda grad: collectives.scatter_sum(by_rank(grad, cp.size, dim), cp, dim),
        )

"""All-gather attention: every rank gathers all keys and values, in one message per layer. Each rank needs memory
for all keys and values."""

import torch
from torch import Tensor, nn

from megatron.context_parallel.sequence import by_rank, chunks_of, in_sequence
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.model.attention import CoreAttention
from megatron.model.attention_mask import Visible, Window, look_back
from megatron.ops.documents import Documents

_SEQUENCE = 2  # the dimension of the sequence in [batch, heads, seq, d]


class GatheredAttention(nn.Module):
    """Computes, with the plain core attention, attention of each of the rank's two chunks of queries to all keys up to
    the end of that chunk."""

    def __init__(self, core: CoreAttention, cp: Axis, window: Window) -> None:
        super().__init__()
        self.core, self.cp, self.window = core, cp, window

    @staticmethod
    def visible(
        cp: Axis, shape: torch.Size, window: Window, documents: Documents | None, device: torch.device
    ) -> tuple[Visible, Visible]:
        """Returns the visible keys of each of this rank's chunks."""
        size, left = shape[1] // 2, look_back(window)
        whole = documents or Documents.of_rows(shape[0], shape[1] * cp.size, device)
        first, second = (whole.part(chunk * size, (chunk + 1) * size) for chunk in chunks_of(cp.rank, cp.size))
        return Visible(first, left), Visible(second, left)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, visible: tuple[Visible, Visible]) -> Tensor:
        """query [batch, heads, seq / ranks, d]; key, value [batch, groups, seq / ranks, d]."""
        key, value = self._all(torch.stack((key, value))).unbind()
        size, results = query.shape[2] // 2, []
        for index, chunk in enumerate(chunks_of(self.cp.rank, self.cp.size)):
            rows, end = slice(index * size, (index + 1) * size), (chunk + 1) * size
            results.append(self.core(query[:, :, rows], key[:, :, :end], value[:, :, :end], visible[index]))
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

"""All-to-all attention (DeepSpeed's Ulysses): exchanges a split of the sequence for a split of the heads, and back."""

from functools import partial
from math import lcm

import torch
from torch import Tensor, nn

from megatron.context_parallel.sequence import by_rank, in_sequence
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.model.attention import CoreAttention
from megatron.model.attention_mask import Visible, Window, look_back
from megatron.ops.documents import Documents


class UlyssesAttention(nn.Module):
    """Computes attention with split heads. KV heads are repeated if their number is not a multiple of the number of
    ranks."""

    def __init__(self, core: CoreAttention, cp: Axis, window: Window) -> None:
        super().__init__()
        self.core, self.cp = core, cp

    @staticmethod
    def visible(
        cp: Axis, shape: torch.Size, window: Window, documents: Documents | None, device: torch.device
    ) -> Visible:
        return Visible(documents, look_back(window))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
        """query [batch, heads, seq / ranks, d]; key, value [batch, groups, seq / ranks, d]."""
        ranks, groups = self.cp.size, key.shape[1]
        copies = lcm(groups, ranks) // groups
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        parts = [x.unflatten(1, (ranks, -1)) for x in (query, key, value)]  # [batch, ranks, heads / ranks, ...]
        sizes = [part.shape[2] for part in parts]
        to_heads, back = partial(_heads_for_sequence, cp=self.cp), partial(_sequence_for_heads, cp=self.cp)
        mine = collectives.differentiable(torch.cat(parts, 2), to_heads, back)  # [batch, all heads / ranks, seq, d]
        result = self.core(*mine.split(sizes, 1), visible)
        return collectives.differentiable(result, back, to_heads).flatten(1, 2)


def _heads_for_sequence(x: Tensor, cp: Axis) -> Tensor:
    """[batch, ranks, heads / ranks, seq / ranks, d] -> [batch, heads / ranks, seq, d]."""
    received = collectives.all_to_all(x.movedim(1, 0), cp)  # [ranks of the sequence, batch, heads, seq / ranks, d]
    return in_sequence(received.movedim(0, 2).flatten(2, 3), cp.size, 2)


def _sequence_for_heads(x: Tensor, cp: Axis) -> Tensor:
    """Reverses `_heads_for_sequence`."""
    parts = by_rank(x, cp.size, 2).unflatten(2, (cp.size, -1))
    return collectives.all_to_all(parts.movedim(2, 0), cp).movedim(0, 1)

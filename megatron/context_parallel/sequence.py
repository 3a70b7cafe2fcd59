"""The model's view of a sequence of which this rank holds a part."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.order import own_positions
from megatron.distributed.state import Axis
from megatron.errors import ConfigError
from megatron.model.attention import KVCache, SequenceView, Window


class ContextAttention(Protocol):
    """A core attention whose queries are this rank's part of the sequence. `visible` computes, once per pass, the
    `mask` and `causal` arguments of its calls in all layers; their meaning is private to each implementation."""

    @staticmethod
    def visible(
        cp: Axis, tokens: int, window: Window, document_ids: Tensor | None, device: torch.device
    ) -> tuple[Tensor | None, bool]: ...


class SharedSequence(SequenceView):
    """This rank's part of the split in `order.py`. `document_ids` are those of the whole sequence."""

    def __init__(self, cp: Axis, attention: type[ContextAttention]) -> None:
        self.cp, self.attention = cp, attention

    def past(self, cache: KVCache | None) -> int:
        if cache is not None:
            raise ConfigError(
                f"--context-parallel-size {self.cp.size}: generation with a cache of keys and values needs the whole "
                "sequence on every rank; use --context-parallel-size 1"
            )
        return 0

    def positions(self, tokens: int, past: int, device: torch.device) -> Tensor:
        return own_positions(tokens, self.cp, device)

    def visible(
        self, tokens: int, past: int, *, window: Window, document_ids: Tensor | None, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        if document_ids is not None:
            whole = tokens * self.cp.size
            assert document_ids.shape[1] == whole, f"document ids of {document_ids.shape[1]} tokens, not of all {whole}"
        return self.attention.visible(self.cp, tokens, window, document_ids, device)

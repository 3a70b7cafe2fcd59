"""The loss mask, position ids and document ids of a batch."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from megatron.errors import ConfigError

ALL_FIELDS = frozenset({"tokens", "labels", "loss_mask", "position_ids", "document_ids"})
"""Of a batch, besides the numbers of its samples."""


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """The end-of-document id, and how it affects masks and positions."""

    eod_id: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and self.eod_id is None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: the tokenizer has no end-of-document id; use one that has, or leave it out")

    def depend_on_tokens(self, fields: Set[str]) -> bool:
        """Whether a batch of these fields takes reading samples; the others follow from its size."""
        read = {
            "tokens": True,
            "labels": True,
            "loss_mask": self.eod_mask_loss,
            "position_ids": self.reset_position_ids,
            "document_ids": self.reset_attention_mask,
        }
        return any(read[field] for field in fields)


def loss_mask(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray:
    """[b, s] -> float32 [b, s]: 0 where the input is an end-of-document token that is masked out."""
    if not masks.eod_mask_loss:
        return np.ones(tokens.shape, dtype=np.float32)
    return (tokens != masks.eod_id).astype(np.float32)


def position_ids(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray:
    """[b, s] -> int64 [b, s]: 0, 1, 2, ...; restarting after each end of document if configured."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    if not masks.reset_position_ids:
        return positions.copy()
    starts = np.where(_follows_eod(tokens, masks.eod_id), positions, 0)
    return positions - np.maximum.accumulate(starts, axis=1)


def document_ids(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray | None:
    """[b, s] -> int64 [b, s]: the number of documents that end before each position; None if not configured.

    Positions with the same id may attend to each other. An end-of-document token belongs to its document.
    """
    if not masks.reset_attention_mask:
        return None
    return np.cumsum(_follows_eod(tokens, masks.eod_id), axis=1, dtype=np.int64)


def _follows_eod(tokens: np.ndarray, eod_id: int | None) -> np.ndarray:
    follows = np.zeros(tokens.shape, dtype=bool)
    follows[:, 1:] = tokens[:, :-1] == eod_id
    return follows

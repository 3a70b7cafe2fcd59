"""Loss mask, position ids and document ids of a batch.

A document ends with the end-of-document token. A conversation (--sft) may end without it, so samples of conversations
carry marks in the bits above the ids.
"""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from megatron.errors import ConfigError

ALL_FIELDS = frozenset({"tokens", "labels", "loss_mask", "position_ids", "document_ids"})
"""Fields of a batch, besides its sample_ids."""
COUNTED, STARTS = 1 << 32, 1 << 33
"""Marks on a token of a conversation. COUNTED: its prediction is in the loss. STARTS: it is the first token."""
_ID = COUNTED - 1


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """The end-of-document id, and its effect on masks and positions."""

    eod_id: int | None = None
    conversations: bool = False
    """Samples have marks, which determine masks and positions. The settings below then have no effect."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and self.eod_id is None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag}: the tokenizer has no end-of-document id; use another tokenizer, or remove {flag}"
                )

    def depend_on_tokens(self, fields: Set[str]) -> bool:
        """True if samples must be read to make these fields. The others depend only on the batch's shape."""
        read = {
            "tokens": True,
            "labels": True,
            "loss_mask": self.eod_mask_loss,
            "position_ids": self.reset_position_ids,
            "document_ids": self.reset_attention_mask,
        }
        return any(read[field] or self.conversations for field in fields)


def without_marks(text: np.ndarray) -> np.ndarray:
    """Returns the token ids without the marks, in the same shape."""
    return text & _ID


def loss_mask(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray:
    """Returns 0 for inputs whose prediction does not count in the loss, else 1. Masked end-of-document tokens do not
    count, nor tokens of a conversation without the mark COUNTED. [b, s] -> float32 [b, s]"""
    if masks.conversations:
        return ((tokens & COUNTED) != 0).astype(np.float32)
    if not masks.eod_mask_loss:
        return np.ones(tokens.shape, dtype=np.float32)
    return (tokens != masks.eod_id).astype(np.float32)


def position_ids(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray:
    """Returns 0, 1, 2, ..., restarting after each end of document if configured. [b, s] -> int64 [b, s]"""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    if not (masks.reset_position_ids or masks.conversations):
        return positions.copy()
    starts = np.where(_starts(tokens, masks), positions, 0)
    return positions - np.maximum.accumulate(starts, axis=1)


def document_starts(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray | None:
    """Returns True where a document begins; None if documents are not separated. [b, s] -> bool [b, s]

    Tokens attend to tokens of their own document only. An end-of-document token belongs to its document.
    """
    if not (masks.reset_attention_mask or masks.conversations):
        return None
    return _starts(tokens, masks)


def _starts(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray:
    """Returns True where a document or conversation begins: [b, s] -> bool [b, s]. A document that begins at position 0
    is not marked."""
    if masks.conversations:
        return (tokens & STARTS) != 0
    follows = np.zeros(tokens.shape, dtype=bool)
    follows[:, 1:] = tokens[:, :-1] == masks.eod_id
    return follows

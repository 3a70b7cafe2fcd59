"""The attention mask: the keys that a query may see."""

import torch
from torch import Tensor

Window = tuple[int, int] | None  # tokens that a query may look back and ahead; -1 is no limit


def attention_mask(
    queries: int, keys: int, *, window: Window, document_ids: Tensor | None, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Returns (mask, causal) for the last `queries` of `keys` positions; document_ids [batch, keys]. The mask is
    None for plain causal attention."""
    left = -1 if window is None else window[0]  # causality hides everything to the right, whatever the window
    windowed = left >= 0 and left + 1 < keys
    if document_ids is None and not windowed:
        return None, queries > 1
    position = torch.arange(keys, device=device)
    distance = position[keys - queries :].unsqueeze(1) - position  # [queries, keys]
    mask = distance >= 0
    if windowed:
        mask &= distance <= left
    mask = mask[None, None]  # [1, 1, queries, keys]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, keys - queries :, None] == document_ids[:, None, None, :])
    return mask, False

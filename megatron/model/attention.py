"""Parts of attention without parameters: the keys that a query may see, and the core attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention_mask import Visible, Window, look_back
from megatron.model.kv_cache import KVCache
from megatron.ops import Kernels
from megatron.ops.documents import Documents


@dataclass(frozen=True)
class AttentionContext:
    """Inputs of the attention that all layers of one forward pass share."""

    visible: Visible = field(default_factory=Visible)
    rope: tuple[Tensor, Tensor] | None = None  # cos and sin, [batch or 1, seq, 1, rotated / 2]
    cache: KVCache | None = None


class SequenceView:
    """Positions and visibility of the tokens of one forward pass: the whole sequence, or the tokens after the cache.
    Context parallelism overrides this view and the core attention."""

    def past(self, cache: KVCache | None) -> int:
        """Number of tokens before the tokens of this pass."""
        return 0 if cache is None else cache.length

    def positions(self, tokens: int, past: int, device: torch.device) -> Tensor:
        return torch.arange(past, past + tokens, device=device)

    def visible(
        self, shape: torch.Size, *, window: Window, documents: Documents | None, device: torch.device
    ) -> Visible:
        """`shape`: [batch, tokens of a row in this pass]."""
        if documents is not None:
            documents.check_shape(*shape)
        return Visible(documents, look_back(window))


class CoreAttention(nn.Module):
    """softmax(QK / sqrt(d)) V."""

    def __init__(self, config: ModelConfig, layer_number: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.scale = config.head_dim**-0.5
        self.dropout_p = config.attention_dropout
        self.layer_scaling = layer_number if config.apply_query_key_layer_scaling else 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
        """query [batch, heads, queries, d]; key, value [batch, groups, keys, d] -> [batch, heads, queries, d]."""
        dropout_p = self.dropout_p if self.training else 0.0
        named = {"scale": self.scale, "dropout_p": dropout_p, "layer_scaling": self.layer_scaling}
        batch, keys = key.shape[0], key.shape[2]
        if visible.rows is not None:
            return self.kernels.attention(query, key, value, mask=visible.rows, causal=False, **named)
        if not visible.is_packed(keys):
            return self.kernels.attention(query, key, value, mask=None, causal=query.shape[2] > 1, **named)
        documents = visible.documents or Documents.of_rows(batch, keys, key.device, query.shape[2])
        return self.kernels.packed_attention(query, key, value, documents=documents, left=visible.left, **named)

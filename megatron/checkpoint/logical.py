"""Every parameter of one unsplit GPT: its logical shape and the 2-D or 1-D shape that it is stored in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    name: str
    logical_shape: tuple[int, ...]
    stored_dims: int  # how many leading logical dimensions the stored rows join

    @property
    def stored_shape(self) -> tuple[int, ...]:
        rows, columns = self.logical_shape[: self.stored_dims], self.logical_shape[self.stored_dims :]
        return (prod(rows), prod(columns)) if columns else (prod(rows),)


def parameters(config: ModelConfig, vocab_size: int) -> Iterator[Parameter]:
    hidden = config.hidden_size
    yield Parameter("embedding.word_embeddings.weight", (vocab_size, hidden), 1)
    if config.positions == "learned":
        yield Parameter("embedding.position_embeddings.weight", (config.max_position_embeddings, hidden), 1)
    for layer in range(config.num_layers):
        for parameter in _layer(config):
            yield Parameter(f"layers.{layer}.{parameter.name}", parameter.logical_shape, parameter.stored_dims)
    yield from _norm(config, "final_layernorm", hidden)
    if not config.tied:
        yield Parameter("output_layer.weight", (vocab_size, hidden), 1)


def _layer(config: ModelConfig) -> Iterator[Parameter]:
    hidden, width = config.hidden_size, config.head_dim
    yield from _norm(config, "input_layernorm", hidden)
    qkv = (config.query_groups, config.num_attention_heads // config.query_groups + 2, width)
    yield Parameter("self_attention.query_key_value.weight", (*qkv, hidden), 3)
    if config.qkv_bias:
        yield Parameter("self_attention.query_key_value.bias", qkv, 3)
    if config.qk_layernorm:
        yield from _norm(config, "self_attention.q_layernorm", width)
        yield from _norm(config, "self_attention.k_layernorm", width)
    yield Parameter("self_attention.dense.weight", (hidden, config.num_attention_heads, width), 1)
    yield from _norm(config, "post_attention_layernorm", hidden)
    inner = (2, config.ffn_size) if config.gated else (config.ffn_size,)
    yield Parameter("mlp.dense_h_to_4h.weight", (*inner, hidden), len(inner))
    yield Parameter("mlp.dense_4h_to_h.weight", (hidden, config.ffn_size), 1)
    if config.linear_bias:
        yield Parameter("self_attention.dense.bias", (hidden,), 1)
        yield Parameter("mlp.dense_h_to_4h.bias", inner, len(inner))
        yield Parameter("mlp.dense_4h_to_h.bias", (hidden,), 1)


def _norm(config: ModelConfig, name: str, width: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), 1)
    if config.normalization == "LayerNorm":
        yield Parameter(f"{name}.bias", (width,), 1)

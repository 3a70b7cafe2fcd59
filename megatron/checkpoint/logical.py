"""Every parameter of one unsplit GPT: its logical shape and the 2-D or 1-D shape that it is stored in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron.config import ModelConfig, MoEConfig


@dataclass(frozen=True)
class Parameter:
    name: str
    logical_shape: tuple[int, ...]
    stored_dims: int  # how many leading logical dimensions the stored rows join

    @property
    def stored_shape(self) -> tuple[int, ...]:
        rows, columns = self.logical_shape[: self.stored_dims], self.logical_shape[self.stored_dims :]
        return (prod(rows), prod(columns)) if columns else (prod(rows),)


def parameters(config: ModelConfig, vocab_size: int, moe: MoEConfig | None = None) -> Iterator[Parameter]:
    with_experts = (moe or MoEConfig()).expert_layers(config.num_layers)
    hidden = config.hidden_size
    yield Parameter("embedding.word_embeddings.weight", (vocab_size, hidden), 1)
    if config.positions == "learned":
        yield Parameter("embedding.position_embeddings.weight", (config.max_position_embeddings, hidden), 1)
    for layer in range(config.num_layers):
        mlp = _moe(config, moe) if moe is not None and layer in with_experts else _mlp(config, "mlp", config.ffn_size)
        for parameter in (*_layer(config), *mlp):
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
    if config.linear_bias:
        yield Parameter("self_attention.dense.bias", (hidden,), 1)


def _mlp(config: ModelConfig, name: str, width: int) -> Iterator[Parameter]:
    hidden = config.hidden_size
    inner = (2, width) if config.gated else (width,)
    yield Parameter(f"{name}.dense_h_to_4h.weight", (*inner, hidden), len(inner))
    yield Parameter(f"{name}.dense_4h_to_h.weight", (hidden, width), 1)
    if config.linear_bias:
        yield Parameter(f"{name}.dense_h_to_4h.bias", inner, len(inner))
        yield Parameter(f"{name}.dense_4h_to_h.bias", (hidden,), 1)


def _moe(config: ModelConfig, moe: MoEConfig) -> Iterator[Parameter]:
    assert moe.num_experts is not None
    yield Parameter("mlp.router.weight", (moe.num_experts, config.hidden_size), 1)
    if moe.moe_router_enable_expert_bias:
        yield Parameter("mlp.router.expert_bias", (moe.num_experts,), 1)
    for expert in range(moe.num_experts):
        yield from _mlp(config, f"mlp.experts.{expert}", moe.moe_ffn_hidden_size or config.ffn_size)
    if moe.moe_shared_expert_intermediate_size is not None:
        yield from _mlp(config, "mlp.shared_expert", moe.moe_shared_expert_intermediate_size)


def _norm(config: ModelConfig, name: str, width: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), 1)
    if config.normalization == "LayerNorm":
        yield Parameter(f"{name}.bias", (width,), 1)

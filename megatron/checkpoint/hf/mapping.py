"""Weights between our logical views and Hugging Face's tensors. Nothing is permuted: both rotate half-split heads.

Each of our parameters becomes one or more of theirs. The two directions of one line stand side by side, so that
import(export(x)) is x.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpoint.hf.family import Style
from megatron.checkpoint.logical import Parameter, parameters
from megatron.config import ModelConfig, MoEConfig

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Exchange:
    """One of our parameters, and theirs."""

    parameter: Parameter
    theirs: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]  # ours, logical -> theirs
    join: Callable[[tuple[Tensor, ...]], Tensor]  # theirs -> ours, logical

    def to_hf(self, stored: Tensor) -> dict[str, Tensor]:
        logical = stored[: self.parameter.stored_shape[0]].view(self.parameter.logical_shape)
        return {name: part.contiguous() for name, part in zip(self.theirs, self.split(logical), strict=True)}

    def from_hf(self, read: Callable[[str], Tensor]) -> Tensor:
        parts = tuple(read(name) for name in self.theirs)
        return self.join(parts).contiguous().view(self.parameter.stored_shape)


def exchanges(config: ModelConfig, vocab_size: int, style: Style, moe: MoEConfig | None = None) -> Iterator[Exchange]:
    """All of them, in the order of the model."""
    make = _gpt2 if style == "gpt2" else _llama
    for parameter in parameters(config, vocab_size, moe):
        if ".mlp.router." in parameter.name or ".mlp.experts." in parameter.name:
            yield _expert(parameter, style)
        else:
            yield make(parameter, config)


def zero_biases(config: ModelConfig, style: Style) -> dict[str, tuple[int, ...]]:
    """Biases that GPT-2 has and this model has not: zero computes the same."""
    if style != "gpt2" or config.linear_bias:
        return {}
    hidden, ffn = config.hidden_size, config.ffn_size
    shapes = {"attn.c_proj.bias": (hidden,), "mlp.c_fc.bias": (ffn,), "mlp.c_proj.bias": (hidden,)}
    if not config.qkv_bias:
        shapes["attn.c_attn.bias"] = (3 * hidden,)
    return {f"transformer.h.{layer}.{name}": s for layer in range(config.num_layers) for name, s in shapes.items()}


def _same(parameter: Parameter, name: str, *, gamma_less_one: bool = False) -> Exchange:
    if gamma_less_one:  # --apply-layernorm-1p stores gamma - 1
        return Exchange(parameter, (name,), lambda t: (t + 1,), lambda parts: parts[0] - 1)
    shape = parameter.logical_shape
    return Exchange(
        parameter, (name,), lambda t: (t.reshape(parameter.stored_shape),), lambda parts: parts[0].reshape(shape)
    )


def _heads_apart(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[groups, q + 2, head_dim, ...] -> Q [heads * head_dim, ...], K and V [groups * head_dim, ...]."""
    rest = qkv.shape[3:]
    query, key, value = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def _heads_together(parts: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    groups, slots, width = shape[:3]
    query, key, value = parts
    query = query.reshape(groups, slots - 2, width, *shape[3:])
    return torch.cat([query, key.reshape(groups, 1, width, *shape[3:]), value.reshape(groups, 1, width, *shape[3:])], 1)


# ---------------------------------------------------------------- GPT-2: fused QKV as [Q; K; V], weights transposed

_GPT2_TOP = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "final_layernorm.weight": "transformer.ln_f.weight",
    "final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}
_GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def _gpt2(parameter: Parameter, config: ModelConfig) -> Exchange:
    norm = "layernorm.weight" in parameter.name and config.apply_layernorm_1p
    if parameter.name in _GPT2_TOP:
        return _same(parameter, _GPT2_TOP[parameter.name], gamma_less_one=norm)
    layer, module, kind = _layer_name(parameter.name)
    name = f"transformer.h.{layer}.{_GPT2_LAYER[module]}.{kind}"
    if module == "self_attention.query_key_value":
        return _gpt2_qkv(parameter, name)
    if kind == "weight" and not module.endswith("layernorm"):
        shape = parameter.logical_shape
        return Exchange(
            parameter,
            (name,),
            lambda t: (t.reshape(parameter.stored_shape).t(),),
            lambda parts: parts[0].t().reshape(shape),
        )
    return _same(parameter, name, gamma_less_one=norm)


def _gpt2_qkv(parameter: Parameter, name: str) -> Exchange:
    def split(qkv: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat(_heads_apart(qkv))  # [3 * hidden, ...]
        return (joined.t() if joined.dim() == 2 else joined,)

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        joined = parts[0].t() if parts[0].dim() == 2 else parts[0]
        return _heads_together(joined.chunk(3), parameter.logical_shape)

    return Exchange(parameter, (name,), split, join)


# ---------------------------------------------------------------- Llama, Qwen, Mistral: Q, K, V, gate, up apart

_LLAMA_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LLAMA_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.dense": "self_attn.o_proj",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def _llama(parameter: Parameter, config: ModelConfig) -> Exchange:
    norm = "layernorm.weight" in parameter.name and config.apply_layernorm_1p
    if parameter.name in _LLAMA_TOP:
        return _same(parameter, _LLAMA_TOP[parameter.name], gamma_less_one=norm)
    layer, module, kind = _layer_name(parameter.name)
    prefix, shape = f"model.layers.{layer}", parameter.logical_shape
    if module == "self_attention.query_key_value":
        names = tuple(f"{prefix}.self_attn.{part}_proj.{kind}" for part in "qkv")
        return Exchange(parameter, names, _heads_apart, lambda parts: _heads_together(parts, shape))
    if module == "mlp.dense_h_to_4h":
        names = (f"{prefix}.mlp.gate_proj.{kind}", f"{prefix}.mlp.up_proj.{kind}")
        return Exchange(parameter, names, lambda t: (t[0], t[1]), torch.stack)
    return _same(parameter, f"{prefix}.{_LLAMA_LAYER[module]}.{kind}", gamma_less_one=norm)


# ---------------------------------------------------------------- experts: theirs are MLPs of the Llama kind

_ROUTERS = {"mixtral": "block_sparse_moe.gate", "qwen3_moe": "mlp.gate"}
_EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


def _expert(parameter: Parameter, style: Style) -> Exchange:
    layer, module, kind = _layer_name(parameter.name)
    prefix = f"model.layers.{layer}"
    if module == "mlp.router":
        return _same(parameter, f"{prefix}.{_ROUTERS[style]}.{kind}")
    place, gate, up, down = _EXPERTS[style]
    _, _, number, part = module.split(".")
    if part == "dense_4h_to_h":
        return _same(parameter, f"{prefix}.{place}.{number}.{down}.{kind}")
    names = tuple(f"{prefix}.{place}.{number}.{half}.{kind}" for half in (gate, up))
    return Exchange(parameter, names, lambda t: (t[0], t[1]), torch.stack)


def _layer_name(name: str) -> tuple[str, str, str]:
    match = _LAYER.fullmatch(name)
    assert match is not None, f"{name} is no parameter of a layer"
    return match[1], match[2], match[3]

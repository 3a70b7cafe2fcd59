"""GPT-2: learned positions, LayerNorm, biases; fused QKV as [Q; K; V] and transposed linear layers (Conv1D)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.interop.hf.exchange import TensorLayout, Tensors, heads_apart, heads_of_groups, same
from megatron.interop.hf.families.gelu import gelu_from_json, gelu_to_json
from megatron.interop.hf.family import (
    Family,
    Lacking,
    beyond_plain_layers,
    other_wirings,
    positions_flag,
    refuse_unless,
)
from megatron.model import parameters as names
from megatron.model.parameters import Row


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor


def _linear(module: str) -> TensorLayout:
    return TensorLayout(
        (module,),
        lambda ours, row: (_transposed(ours.reshape(row.stored_shape)),),
        lambda parts, row: (_transposed(parts[0]).view(row.shape),),
    )


def _fused_qkv(module: str) -> TensorLayout:
    def split(qkv: Tensor, row: Row) -> Tensors:
        return (_transposed(torch.cat(heads_apart(qkv))),)  # from [3 * hidden, ...]

    def blocks(parts: Tensors, row: Row) -> Tensors:
        return heads_of_groups(_transposed(parts[0]).chunk(3), row)

    return TensorLayout((module,), split, blocks, along=1)


_LAYER = "transformer.h.{layer}"
_TENSORS = {
    names.WORDS: same("transformer.wte"),
    names.POSITIONS: same("transformer.wpe"),
    names.INPUT_NORM: same(f"{_LAYER}.ln_1"),
    names.QKV: _fused_qkv(f"{_LAYER}.attn.c_attn"),
    names.ATTENTION_OUT: _linear(f"{_LAYER}.attn.c_proj"),
    names.POST_ATTENTION_NORM: same(f"{_LAYER}.ln_2"),
    f"{names.MLP}.{names.UP}": _linear(f"{_LAYER}.mlp.c_fc"),
    f"{names.MLP}.{names.DOWN}": _linear(f"{_LAYER}.mlp.c_proj"),
    names.FINAL_NORM: same("transformer.ln_f"),
    names.HEAD: same("lm_head"),
}


_ALSO_CALLED = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Alternative names that transformers prefers."""


class GPT2(Family):
    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    tensors = _TENSORS
    buffers = (".attn.bias", ".attn.masked_bias")
    always_biased = True
    tied_by_default = True

    def lacks(self, c: ModelConfig) -> Lacking:
        return [
            (positions_flag(c), c.positions != "learned"),
            *beyond_plain_layers(c),
            *other_wirings(c),
        ]

    def model_to_json(self, config: ModelConfig, context: int) -> dict[str, Any]:
        return {
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_attention_heads,
            "n_inner": config.ffn_size,
            "n_positions": config.max_position_embeddings,
            "n_ctx": config.max_position_embeddings,
            "activation_function": gelu_to_json(config),
            "layer_norm_epsilon": config.norm_epsilon,
            "attn_pdrop": config.attention_dropout,
            "embd_pdrop": config.hidden_dropout,
            "resid_pdrop": config.hidden_dropout,
        }

    def not_taken_over(self, values: Mapping[str, Any]) -> str | None:
        embedding, residual = (values.get(name, 0.1) for name in ("embd_pdrop", "resid_pdrop"))
        if embedding == residual:
            return None
        return (
            f"config.json: embd_pdrop {embedding} is not imported: --hidden-dropout is used for both, with the value "
            f"of resid_pdrop, {residual}"
        )

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = {**values, **{name: values[other] for other, name in _ALSO_CALLED.items() if other in values}}
        refuse_unless(
            values,
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            reorder_and_upcast_attn=False,
            add_cross_attention=False,
        )
        return {
            "num_layers": values["n_layer"],
            "hidden_size": values["n_embd"],
            "ffn_hidden_size": values.get("n_inner") or 4 * values["n_embd"],
            "num_attention_heads": values["n_head"],
            "max_position_embeddings": values["n_positions"],
            "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
            "attention_dropout": values.get("attn_pdrop", 0.1),
            "hidden_dropout": values.get("resid_pdrop", 0.1),
            **gelu_from_json("activation_function", values.get("activation_function", "gelu_new")),
        }

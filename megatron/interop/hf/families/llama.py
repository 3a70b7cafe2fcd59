"""Llama, and what its descendants share: RoPE, RMSNorm, gated MLP, no fused weights."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.interop.hf.exchange import same, separate_gate_and_up, separate_qkv
from megatron.interop.hf.family import Family, Lacking, other_wirings, positions_flag, refuse_unless
from megatron.interop.hf.rope import rope_from_json, rope_to_json
from megatron.model import parameters as names

LAYER = "model.layers.{layer}"
_ATTENTION = f"{LAYER}.self_attn"
_TENSORS = {
    names.WORDS: same("model.embed_tokens"),
    names.INPUT_NORM: same(f"{LAYER}.input_layernorm"),
    names.QKV: separate_qkv(f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
    names.Q_NORM: same(f"{_ATTENTION}.q_norm"),
    names.K_NORM: same(f"{_ATTENTION}.k_norm"),
    names.ATTENTION_OUT: same(f"{_ATTENTION}.o_proj"),
    names.POST_ATTENTION_NORM: same(f"{LAYER}.post_attention_layernorm"),
    f"{names.MLP}.{names.UP}": separate_gate_and_up(f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    f"{names.MLP}.{names.DOWN}": same(f"{LAYER}.mlp.down_proj"),
    names.FINAL_NORM: same("model.norm"),
    names.HEAD: same("lm_head"),
}


class LlamaLike(Family):
    """Base of models without experts; a descendant overrides the settings in which it differs."""

    tensors = _TENSORS
    buffers = (".rotary_emb.inv_freq",)
    normalizes_qk: ClassVar[bool] = False
    norms_span: ClassVar[str] = "head"
    """Scope of the norms of queries and keys."""
    norm_placement: ClassVar[str] = "before"
    may_have_biases: ClassVar[bool] = False
    has_qkv_bias: ClassVar[bool] = False
    may_have_window: ClassVar[bool] = True
    bias_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that switch biases on."""
    default_head_dim: ClassVar[int | None] = None
    """Size of a head if config.json has none; None means hidden size / heads."""

    def lacks(self, c: ModelConfig) -> Lacking:
        activation = "--squared-relu" if c.squared_relu else "GELU"
        together = "--qk-layernorm with " if self.normalizes_qk else ""
        qkv_alone = self.has_qkv_bias or self.may_have_biases  # a family with all biases can set the others to zero
        return [
            (positions_flag(c), c.positions != "rope"),
            (f"--normalization {c.normalization}", c.normalization != "RMSNorm"),
            (f"{activation} (without --swiglu)", not c.swiglu),
            (f"--rotary-percent {c.rotary_percent}", c.rotary_percent != 1.0),
            (f"--window-size {c.window}", c.window is not None and (c.window[1] != 0 or c.window[0] < 0)),
            *other_wirings(c, norms=self.norm_placement),
            ("--qk-layernorm", c.qk_layernorm and not self.normalizes_qk),
            (
                f"--qk-layernorm-scope {c.qk_layernorm_scope}",
                c.qk_layernorm and c.qk_layernorm_scope != self.norms_span,
            ),
            (f"{together}biases (without --disable-bias-linear)", c.linear_bias and not self.may_have_biases),
            (f"{together}--add-qkv-bias", c.qkv_bias and not c.linear_bias and not qkv_alone),
            ("no --qk-layernorm", self.normalizes_qk and not c.qk_layernorm),
            ("no QKV bias (without --add-qkv-bias)", self.has_qkv_bias and not c.qkv_bias),
            (f"--window-size {c.window}", c.window is not None and not self.may_have_window),
        ]

    def model_to_json(self, config: ModelConfig, context: int) -> dict[str, Any]:
        return {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.query_groups,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_epsilon,
            "max_position_embeddings": context,
            "attention_dropout": config.attention_dropout,
            **rope_to_json(config),
            **dict.fromkeys(self.bias_keys, config.linear_bias),
            **self.window_to_json(config),
        }

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unless(values, hidden_act="silu", pretraining_tp=1)
        heads = values["num_attention_heads"]
        # A missing number has a default that differs between families and versions; null means one for each head.
        groups = values["num_key_value_heads"] or heads
        return {
            "num_layers": values["num_hidden_layers"],
            "hidden_size": values["hidden_size"],
            "ffn_hidden_size": values["intermediate_size"],
            "num_attention_heads": heads,
            "kv_channels": values.get("head_dim") or self.default_head_dim or values["hidden_size"] // heads,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else None,
            "max_position_embeddings": values["max_position_embeddings"],
            "normalization": "RMSNorm",
            "norm_epsilon": values.get("rms_norm_eps", 1e-6),
            "swiglu": True,
            "qk_layernorm": self.normalizes_qk,
            "qk_layernorm_scope": self.norms_span,
            "norm_placement": self.norm_placement,
            "attention_dropout": values.get("attention_dropout", 0.0),
            "hidden_dropout": 0.0,
            "window_size": self.window_from_json(values),
            "add_bias_linear": self._biases_from_json(values),
            "add_qkv_bias": self.has_qkv_bias or self._only_attention_is_biased(values),
            **rope_from_json(values),
        }

    def _biases_from_json(self, values: Mapping[str, Any]) -> bool:
        if self.has_qkv_bias:  # such a family has no other biases, whatever config.json says
            return False
        attention, mlp = bool(values.get("attention_bias", False)), bool(values.get("mlp_bias", False))
        if not self.may_have_biases:
            refuse_unless({"attention_bias": attention, "mlp_bias": mlp}, attention_bias=False, mlp_bias=False)
        if mlp and not attention:
            raise ConfigError(
                "config.json: attention_bias False with mlp_bias True is not supported; set both or neither"
            )
        return mlp

    def _only_attention_is_biased(self, values: Mapping[str, Any]) -> bool:
        """True if config.json gives biases to attention only. The bias of its output projection is then zero."""
        return self.may_have_biases and bool(values.get("attention_bias")) and not values.get("mlp_bias")

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {}

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        return None


def window_width(config: ModelConfig) -> int | None:
    """Window width for config.json. It counts the query's own token, unlike --window-size."""
    return None if config.window is None else config.window[0] + 1


def window_of(width: int | None) -> tuple[int, int] | None:
    return None if width is None else (int(width) - 1, 0)


class Llama(LlamaLike):
    architecture = "LlamaForCausalLM"
    model_type = "llama"
    may_have_biases = True
    may_have_window = False
    bias_keys = ("attention_bias", "mlp_bias")

    def lacks(self, c: ModelConfig) -> Lacking:
        uneven = c.hidden_size % c.num_attention_heads != 0  # transformers rejects this only for Llama
        return [
            *super().lacks(c),
            (f"--hidden-size {c.hidden_size} with --num-attention-heads {c.num_attention_heads}", uneven),
        ]

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_from_json({"num_key_value_heads": None, **values})

    def model_to_json(self, config: ModelConfig, context: int) -> dict[str, Any]:
        return super().model_to_json(config, context) | {"attention_bias": config.qkv_bias}

    def zero_biases(self, config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
        if config.linear_bias or not config.qkv_bias:
            return {}
        (module,) = self.tensors[names.ATTENTION_OUT].modules
        layers = range(config.num_layers)
        return {f"{module.format(layer=layer)}.bias": torch.zeros(config.hidden_size) for layer in layers}

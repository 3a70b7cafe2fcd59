"""Llama and its descendants Qwen2, Qwen3, Mistral, Mixtral, Qwen3-MoE: RoPE, RMSNorm, gated MLP, no fused weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.checkpoint.hf.exchange import TensorLayout, same, separate_gate_and_up, separate_qkv
from megatron.checkpoint.hf.family import Family, Lacking, positions_flag, refuse_unless
from megatron.checkpoint.hf.rope import rope_from_json, rope_to_json
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import ConfigError
from megatron.model import parameters as names

_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
_TENSORS = {
    names.WORDS: same("model.embed_tokens"),
    names.INPUT_NORM: same(f"{_LAYER}.input_layernorm"),
    names.QKV: separate_qkv(f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
    names.Q_NORM: same(f"{_ATTENTION}.q_norm"),
    names.K_NORM: same(f"{_ATTENTION}.k_norm"),
    names.ATTENTION_OUT: same(f"{_ATTENTION}.o_proj"),
    names.POST_ATTENTION_NORM: same(f"{_LAYER}.post_attention_layernorm"),
    f"{names.MLP}.{names.UP}": separate_gate_and_up(f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
    f"{names.MLP}.{names.DOWN}": same(f"{_LAYER}.mlp.down_proj"),
    names.FINAL_NORM: same("model.norm"),
    names.HEAD: same("lm_head"),
}


class LlamaLike(Family):
    """Without experts; a descendant says in which of these settings it differs."""

    tensors = _TENSORS
    buffers = (".rotary_emb.inv_freq",)
    normalizes_qk: ClassVar[bool] = False
    may_have_biases: ClassVar[bool] = False
    has_qkv_bias: ClassVar[bool] = False
    may_have_window: ClassVar[bool] = True
    bias_keys: ClassVar[tuple[str, ...]] = ()
    """Where config.json says whether there are biases."""
    default_head_dim: ClassVar[int | None] = None
    """Where config.json has none; None: hidden size / heads."""

    def lacks(self, c: ModelConfig) -> Lacking:
        activation = "--squared-relu" if c.squared_relu else "GELU"
        together = "--qk-layernorm with " if self.normalizes_qk else ""
        return [
            (positions_flag(c), c.positions != "rope"),
            (f"--normalization {c.normalization}", c.normalization != "RMSNorm"),
            (f"{activation} (without --swiglu)", not c.swiglu),
            (f"--rotary-percent {c.rotary_percent}", c.rotary_percent != 1.0),
            (f"--window-size {c.window}", c.window is not None and (c.window[1] != 0 or c.window[0] < 0)),
            ("--apply-residual-connection-post-layernorm", c.apply_residual_connection_post_layernorm),
            ("--qk-layernorm", c.qk_layernorm and not self.normalizes_qk),
            (f"{together}biases (without --disable-bias-linear)", c.linear_bias and not self.may_have_biases),
            (f"{together}--add-qkv-bias", c.qkv_bias and not c.linear_bias and not self.has_qkv_bias),
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
        refuse_unless(values, hidden_act="silu", pretraining_tp=1, partial_rotary_factor=1.0)
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
            "attention_dropout": values.get("attention_dropout", 0.0),
            "hidden_dropout": 0.0,
            "window_size": self.window_from_json(values),
            "add_bias_linear": self._biases_from_json(values),
            "add_qkv_bias": self.has_qkv_bias,
            **rope_from_json(values),
        }

    def _biases_from_json(self, values: Mapping[str, Any]) -> bool:
        if self.has_qkv_bias:  # and then no other, whatever config.json says
            return False
        attention, mlp = bool(values.get("attention_bias", False)), bool(values.get("mlp_bias", False))
        if attention != mlp or (attention and not self.may_have_biases):
            raise ConfigError(
                f"config.json: attention_bias {attention} with mlp_bias {mlp} is not supported; both or none"
            )
        return attention

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {}

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        return None


def _window_width(config: ModelConfig) -> int | None:
    """Theirs counts the query's own token, ours does not."""
    return None if config.window is None else config.window[0] + 1


def _window_of(width: int | None) -> tuple[int, int] | None:
    return None if width is None else (int(width) - 1, 0)


class Llama(LlamaLike):
    architecture = "LlamaForCausalLM"
    model_type = "llama"
    may_have_biases = True
    may_have_window = False
    bias_keys = ("attention_bias", "mlp_bias")

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_from_json({"num_key_value_heads": None, **values})


class Mistral(LlamaLike):
    architecture = "MistralForCausalLM"
    model_type = "mistral"
    default_window: ClassVar[int | None] = 4096
    """Where config.json has none; without a window it says null."""

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": _window_width(config)}

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        return _window_of(values.get("sliding_window", self.default_window))


class Qwen2(LlamaLike):
    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    has_qkv_bias = True

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        width = _window_width(config)
        if width is None:
            return {"use_sliding_window": False, "sliding_window": None}
        return {
            "use_sliding_window": True,
            "sliding_window": width,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"] * config.num_layers,
        }

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        if values.get("sliding_window") is None or not values.get("use_sliding_window", False):
            return None
        if not self.may_have_window:
            raise ConfigError(f"config.json: a sliding window with experts is not supported for {self.model_type}")
        kinds = set(values.get("layer_types") or [])
        from_layer = values.get("max_window_layers", 28)
        if kinds == {"full_attention"} or (not kinds and from_layer >= values["num_hidden_layers"]):
            return None
        if kinds != {"sliding_attention"} and (kinds or from_layer > 0):
            raise ConfigError("config.json: a sliding window in some layers only is not supported")
        return _window_of(values["sliding_window"])


class Qwen3(Qwen2):
    """Norms of Q and K in the place of Qwen2's biases."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    normalizes_qk = True
    has_qkv_bias = False
    bias_keys = ("attention_bias",)
    default_head_dim: ClassVar[int | None] = 128


# ---------------------------------------------------------------- with experts


def _experts(module: str, gate: str, up: str, down: str) -> dict[str, TensorLayout]:
    expert = module + ".experts.{expert}"
    return {
        names.ROUTER: same(f"{module}.gate"),
        f"{names.EXPERT}.{names.UP}": separate_gate_and_up(f"{expert}.{gate}", f"{expert}.{up}"),
        f"{names.EXPERT}.{names.DOWN}": same(f"{expert}.{down}"),
    }


def _softmax_routing_lacks(moe: MoEConfig) -> Lacking:
    """What families whose experts are chosen by a plain softmax cannot express."""
    return [
        ("no --num-experts", not moe.is_on),
        (f"--moe-router-score-function {moe.moe_router_score_function}", moe.moe_router_score_function != "softmax"),
        ("--moe-router-topk-scaling-factor", moe.moe_router_topk_scaling_factor is not None),
        (f"--moe-router-num-groups {moe.moe_router_num_groups}", moe.moe_router_num_groups is not None),
        (f"--moe-expert-capacity-factor {moe.moe_expert_capacity_factor}", moe.moe_expert_capacity_factor is not None),
        ("--moe-shared-expert-intermediate-size", moe.moe_shared_expert_intermediate_size is not None),
    ]


class Mixtral(Mistral):
    """Experts in every layer, weighted by a softmax over those that a token uses."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    default_window = None
    tensors = Mistral.tensors | _experts(f"{_LAYER}.block_sparse_moe", gate="w1", up="w3", down="w2")

    def lacks_of_experts(self, c: ModelConfig, moe: MoEConfig) -> Lacking:
        dense_layers = moe.is_on and len(moe.expert_layers(c.num_layers)) < c.num_layers
        return [
            *_softmax_routing_lacks(moe),
            ("--moe-router-pre-softmax", moe.moe_router_pre_softmax),
            (f"--moe-layer-freq {moe.moe_layer_freq}", dense_layers),
        ]

    def experts_to_json(self, config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
        return {
            "num_experts_per_tok": moe.moe_router_topk,
            "router_aux_loss_coef": moe.moe_aux_loss_coeff,
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.moe_ffn_hidden_size or config.ffn_size,
        }

    def experts_from_json(self, values: Mapping[str, Any]) -> MoEConfig:
        return MoEConfig(num_experts=values["num_local_experts"], moe_router_topk=values["num_experts_per_tok"])


class Qwen3MoE(Qwen3):
    """Experts in all layers or in some."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    may_have_window = False
    default_head_dim = None
    tensors = Qwen3.tensors | _experts(f"{_LAYER}.mlp", gate="gate_proj", up="up_proj", down="down_proj")

    def lacks_of_experts(self, c: ModelConfig, moe: MoEConfig) -> Lacking:
        return _softmax_routing_lacks(moe)

    def experts_to_json(self, config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
        with_experts = moe.expert_layers(config.num_layers)
        return {
            "num_experts_per_tok": moe.moe_router_topk,
            "router_aux_loss_coef": moe.moe_aux_loss_coeff,
            "num_experts": moe.num_experts,
            "moe_intermediate_size": moe.moe_ffn_hidden_size or config.ffn_size,
            "norm_topk_prob": not moe.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in with_experts],
        }

    def experts_from_json(self, values: Mapping[str, Any]) -> MoEConfig:
        layers, step = values["num_hidden_layers"], values.get("decoder_sparse_step", 1)
        dense = set(values.get("mlp_only_layers") or ())
        with_experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        return MoEConfig(
            num_experts=values.get("num_local_experts") or values["num_experts"],  # transformers 5 and 4
            moe_router_topk=values["num_experts_per_tok"],
            moe_router_pre_softmax=not values.get("norm_topk_prob", False),
            moe_ffn_hidden_size=values["moe_intermediate_size"],
            moe_layer_freq="1" if all(with_experts) else f"[{','.join(map(str, with_experts))}]",
        )

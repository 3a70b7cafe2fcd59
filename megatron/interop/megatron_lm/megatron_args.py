"""Converts the `args` of Megatron-LM's checkpoints to the configuration of a model, and back."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron.checkpoint import classic
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm.advice import NOT_A_GPT, SAVE_AGAIN

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_OTHER_NAMES = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
"""Names in Megatron-LM's configuration class, which its later versions also write to the args."""
_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    # settings that change the model's function and are not supported: the values that mean "off"
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (0, None),
    "heterogeneous_layers_config_path": (None,),
    "is_hybrid_model": (False, None),
    "hybrid_override_pattern": (None,),
    "experimental_attention_variant": (None,),
    "softmax_type": ("vanilla", None),
    "softmax_scale": (None,),
    "qk_l2_norm": (False, None),
    "window_attn_skip_freq": (None,),
    "rotary_base_per_layer": (None,),
    "glu_linear_offset": (0, None),
    "activation_func_clamp_value": (None,),
    "use_mup": (False, None),
    "enable_hyper_connections": (False, None),
    "moe_apply_probs_on_input": (False, None),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_n_hash_layers": (0, None),
    "moe_router_topk_limited_devices": (None,),
    "attention_output_gate": (False, None),
    "moe_shared_expert_gate": (False, None),
    "rotary_interleaved": (False, None),
    "quick_geglu": (False, None),
    "geglu": (False, None),
    "add_binary_head": (False, None),
    "no_rope_freq": (None,),
    "yarn_correction_range_round_to_int": (True, None),
    "normalization": ("LayerNorm", "RMSNorm", "layernorm", "rmsnorm", None),
}
_WHILE_TRAINING = (  # settings of loss, devices and rounding, which come from the run's own flags
    "apply_query_key_layer_scaling",
    *("moe_router_dtype", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_router_bias_update_rate", "mtp_loss_scaling_factor"),
    *("q_lora_rank", "kv_lora_rank", "multi_latent_attention", "mtp_num_layers"),
    *("attention_softmax_in_fp32", "fp32_residual_connection", "attention_dropout", "hidden_dropout", "model"),
    *("group_query_attention", "num_query_groups", "position_embedding_type", "add_position_embedding"),
)
_NOT_READ_BY_CORE = ("apply_residual_connection_post_layernorm", "openai_gelu")


def settings_from_args(args: Mapping[str, Any], where: Path, *, core: bool = False) -> dict[str, dict[str, Any]]:
    """Returns settings as in a native manifest. `core`: a core model, which ignores some args."""
    args = {name: value for name, value in args.items() if not (core and name in _NOT_READ_BY_CORE)}
    lacking = [name for name in _NEEDED if type(args.get(name)) is not int]
    if lacking:
        raise CheckpointError(
            f"{where}: its args have no {', '.join(lacking)}: it is not a GPT of Megatron-LM; {NOT_A_GPT}"
        )
    _refuse_what_is_not_built(args, where)
    if args.get("position_embedding_type") == "yarn" and args.get("yarn_rotary_scaling_factor") is None:
        raise CheckpointError(f"{where}: its args have YaRN positions but no yarn_rotary_scaling_factor; {SAVE_AGAIN}")
    model = asdict(model_config(_section(args, ModelConfig) | _attention(args) | _positions(args) | _activation(args)))
    moe = asdict(moe_config({"moe": _experts(args)}))
    precision = {"bf16": bool(args.get("bf16")), "fp16": bool(args.get("fp16"))}
    window = model["window_size"]
    return {
        "model": {**model, "window_size": window and list(window)},
        "moe": moe,
        "precision": precision,
        "tokenizer": {"vocab_size": None},
    }


def _refuse_what_is_not_built(args: Mapping[str, Any], where: Path) -> None:
    for name, off in _NOT_BUILT.items():
        if name in args and args[name] not in off:
            raise CheckpointError(
                f"{where}: its args have {name} = {str(args[name])[:60]}, which is not supported; choose another model"
            )
    balancing = args.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):  # chooses the experts differently
        name = "moe_router_load_balancing_type"
        raise CheckpointError(f"{where}: its args have {name} = sinkhorn, which is not supported; choose another model")
    for name, other in _OTHER_NAMES.items():
        one, two = args.get(name), args.get(other)
        if one is not None and two is not None and one != two:
            raise CheckpointError(
                f"{where}: its args have {name} = {one} and {other} = {two}, but both are one setting; {SAVE_AGAIN}"
            )


def _section(args: Mapping[str, Any], section: type[ModelConfig | MoEConfig]) -> dict[str, Any]:
    """Returns the args with the names of our fields; absent args, and args of None, get our defaults."""
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in args.items() if value is not None}
    names = {field.name for field in fields(section)} - set(_WHILE_TRAINING)
    return {name: renamed[name] for name in sorted(names) if renamed.get(name) is not None}


def _attention(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attention settings. Megatron-LM's number of query groups is 1 where grouping is off."""
    if not args.get("group_query_attention"):
        return {}
    return {"group_query_attention": True, "num_query_groups": args.get("num_query_groups")}


def _positions(args: Mapping[str, Any]) -> dict[str, Any]:
    kind = args.get("position_embedding_type") or "learned_absolute"
    if args.get("use_rotary_position_embeddings"):
        kind = "rope"
    if not args.get("add_position_embedding", True) and kind == "learned_absolute":
        kind = "none"
    found: dict[str, Any] = {"position_embedding_type": kind, "use_rotary_position_embeddings": False}
    if kind == "yarn":
        found |= _yarn(args)
    if kind != "rope":
        found |= {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
    factor = args.get("rotary_seq_len_interpolation_factor")
    if factor in (None, 1):
        found["rotary_seq_len_interpolation_factor"] = None
    else:
        found["rotary_seq_len_interpolation_factor"] = float(factor)
    return found


def _yarn(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the YaRN settings. Megatron-LM's attention factor is the quotient of two factors, each with its own
    mscale. Megatron-LM rotates the whole head, regardless of rotary_percent."""
    factor, attention = float(args["yarn_rotary_scaling_factor"]), args.get("yarn_attention_factor")
    by_default = _attention_factor(factor, 1.0)
    whole, part = args.get("yarn_mscale"), args.get("yarn_mscale_all_dim")
    if attention is None and whole is not None and part is not None:
        quotient = _attention_factor(factor, float(whole)) / _attention_factor(factor, float(part))
        attention = None if quotient == by_default else quotient
    return {"yarn_factor": factor, "yarn_attention_factor": attention, "rotary_percent": 1.0}


def _attention_factor(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _their_yarn(config: ModelConfig) -> dict[str, Any]:
    if config.rope_scaling != "yarn":
        return {}
    mscale = 1.0
    if config.yarn_attention_factor is not None and config.yarn_factor > 1:
        mscale = (config.yarn_attention_factor - 1.0) / (0.1 * math.log(config.yarn_factor))
    return {
        "yarn_rotary_scaling_factor": config.yarn_factor,
        "yarn_correction_range_round_to_int": True,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": 0.0,
    }


def _activation(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the activation settings. Fusion and bias decide the form of GELU; 23.06 never fuses without a bias."""
    norm = str(args.get("normalization") or "LayerNorm").lower()
    return {
        "swiglu": bool(args.get("swiglu")),
        "bias_gelu_fusion": bool(args.get("bias_gelu_fusion", True)),
        "normalization": "RMSNorm" if norm == "rmsnorm" else "LayerNorm",
    }


def _experts(args: Mapping[str, Any]) -> dict[str, Any]:
    if not args.get("num_experts"):
        return {}
    found = _section(args, MoEConfig)
    frequency = found.get("moe_layer_freq", 1)
    found["moe_layer_freq"] = (
        "[" + ",".join(str(int(one)) for one in frequency) + "]" if isinstance(frequency, list) else str(frequency)
    )
    return found


def padded_rows(args: Mapping[str, Any]) -> int | None:
    value = args.get("padded_vocab_size")
    return value if type(value) is int and value > 0 else None


def true_vocabulary(args: Mapping[str, Any], rows: int) -> int:
    """Returns the true number of rows of a table with `rows` padded ones, or `rows` if the args lack it."""
    value = args.get("vocab_size")
    if type(value) is not int:
        return rows
    value += _ids_beside_numbers(args)
    return value if 0 < value <= rows else rows


def _ids_beside_numbers(args: Mapping[str, Any]) -> int:
    """Returns 1 for NullTokenizer if its end of a document is an id beyond --vocab-size, else 0."""
    return int(args.get("tokenizer_type") == "NullTokenizer" and args.get("null_tokenizer_eod_id") is None)


def their_args(
    config: ModelConfig, moe: MoEConfig, vocab_size: int, *, tp: int, pp: int, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the args that Megatron-LM's loaders compare and `--use-checkpoint-args` takes, as plain values."""
    model = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
        if name not in ("model", "norm_epsilon")
    }
    values = model | classic.model_arguments(config, vocab_size, tp)
    rotary = config.positions == "rope" and config.rope_scaling != "yarn"
    values |= {
        "layernorm_epsilon": config.norm_epsilon,
        "norm_epsilon": config.norm_epsilon,
        "ffn_hidden_size": config.ffn_size,
        "kv_channels": config.head_dim,
        "group_query_attention": config.query_groups != config.num_attention_heads,
        "num_query_groups": config.query_groups,
        "bias_gelu_fusion": config.bias_gelu_fusion,
        "openai_gelu": config.openai_gelu,
        "add_position_embedding": config.positions == "learned",
        "use_rotary_position_embeddings": rotary,
        "position_embedding_type": "rope" if rotary else config.position_embedding_type,
        **_their_yarn(config),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tp,
        "virtual_pipeline_model_parallel_size": None,
        "num_experts": None,
        "vocab_size": vocab_size - _ids_beside_numbers(others),
    }
    if moe.is_on:
        frequency = moe.expert_layers(config.num_layers)
        values |= asdict(moe) | {"moe_layer_freq": [int(n in frequency) for n in range(config.num_layers)]}
    return {**others, **values}

"""Checks of the model's shape, number formats, recomputation and kernels."""

from megatron.config.notices import spelled
from megatron.config.run import RunConfig, all_settings
from megatron.errors import ConfigError
from megatron.utils.numerals import WIDTH


def missing(config: RunConfig) -> list[str]:
    """Returns the required flags that were not given."""
    flags = [setting.spelling for setting in all_settings() if setting.flag.required and not config.value(setting)]
    training = config.training
    divided = training.gradient_accumulation_steps is not None or config.runtime.deepspeed_config is not None
    if training.global_batch_size is not None and divided:
        flags = [flag for flag in flags if flag != "--micro-batch-size"]  # computed from the other two
    if config.model.positions == "learned" and not config.model.max_position_embeddings:
        flags.append("--max-position-embeddings")
    return flags


def required(flags: list[str]) -> ConfigError:
    return ConfigError(f"{', '.join(flags)}: required and not given; give them (or a --model preset for the shape)")


def check_heads(config: RunConfig) -> None:
    model = config.model
    if model.num_attention_heads and model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"{spelled(config, 'hidden_size')} is not divisible by {spelled(config, 'num_attention_heads')}; "
            "change one of them, or give the width of a head with --kv-channels"
        )
    if model.kv_channels is not None and model.num_attention_heads * model.kv_channels > WIDTH:
        raise ConfigError(
            f"{spelled(config, 'num_attention_heads')} {spelled(config, 'kv_channels')}: the product is above {WIDTH}; "
            "give fewer or narrower heads"
        )
    if model.group_query_attention and model.num_query_groups is None:
        raise ConfigError("--group-query-attention: needs the number of key/value heads; add --num-query-groups N")
    if model.num_query_groups is not None and model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"{spelled(config, 'num_attention_heads')} is not divisible by {spelled(config, 'num_query_groups')}; "
            "give a number of query groups that divides the heads"
        )


def check_width(config: RunConfig) -> None:
    if config.model.hidden_size and not config.model.ffn_size:
        raise ConfigError(
            f"{spelled(config, 'hidden_size')} --swiglu: the MLP's width, 8/3 x hidden size rounded down to a multiple "
            "of 64, is 0; give --ffn-hidden-size"
        )


def check_positions(config: RunConfig) -> None:
    model, data = config.model, config.data
    if model.max_position_embeddings and data.seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"{spelled(config, 'seq_length')} is longer than {spelled(config, 'max_position_embeddings')}; "
            f"raise --max-position-embeddings to {data.seq_length} or shorten --seq-length"
        )


def check_rope(config: RunConfig) -> None:
    model = config.model
    scalings = _on(
        {
            "--position-embedding-type yarn": model.position_embedding_type == "yarn",
            "--use-rope-scaling": model.use_rope_scaling,
            "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
        }
    )
    if scalings and model.positions != "rope":
        raise ConfigError(f"{scalings[0]}: needs rotary positions; add --position-embedding-type rope")
    if model.positions != "rope" or not model.num_attention_heads:
        return
    rotated = int(model.head_dim * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        raise ConfigError(
            f"{spelled(config, 'rotary_percent')} of {model.head_dim} channels per head rotates {rotated} channels, "
            "which is not a positive even number; change the head width or the percentage"
        )
    if model.use_rope_scaling and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        raise ConfigError(
            f"{spelled(config, 'rope_low_freq_factor')} is not below {spelled(config, 'rope_high_freq_factor')}; "
            "swap them"
        )


def _on(flags: dict[str, bool]) -> list[str]:
    return [name for name, on in flags.items() if on]


def check_window(config: RunConfig) -> None:
    window = config.model.window_size
    if window is not None and (len(window) != 2 or window[0] < 0 or window[1] != 0):
        raise ConfigError(
            f"{spelled(config, 'window_size')}: a causal model sees LEFT >= 0 tokens to the left and 0 to the right; "
            "give --window-size LEFT 0"
        )


def check_precision(config: RunConfig) -> None:
    precision = config.precision
    if config.model.fp32_residual_connection and precision.params_dtype == "float32":
        raise ConfigError(
            "--fp32-residual-connection: everything is fp32 already; remove the flag, or add --bf16 or --fp16"
        )
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise ConfigError(
            f"{spelled(config, 'min_loss_scale')} is above {spelled(config, 'initial_loss_scale')}; lower the former"
        )


def check_recomputed_parts(config: RunConfig) -> None:
    """Checks that the model has layers with the parts in --recompute-modules."""
    parts, layers = config.recompute.recompute_modules or (), config.model.num_layers
    with_experts = len(config.moe.expert_layers(layers))
    for part, other, there in (
        ("moe", "mlp", with_experts),
        ("moe_act", "mlp", with_experts),
        ("mlp", "moe", layers - with_experts),
        ("layernorm", "core_attn", config.model.norm_placement != "after"),
    ):
        if layers and part in parts and not there:
            raise ConfigError(f"{spelled(config, 'recompute_modules')}: no layer has the part {part}; give {other}")


def check_recompute(config: RunConfig) -> None:
    recompute = config.recompute
    parts = set(recompute.modules)
    if {"moe", "moe_act"} <= parts:
        also = "" if "moe" in (recompute.recompute_modules or ()) else " of --moe-layer-recompute"
        raise ConfigError(f"{spelled(config, 'recompute_modules')}: moe{also} includes moe_act; remove moe_act")
    if recompute.cpu_offloading_num_layers and parts & {"layernorm", "moe_act"}:
        raise ConfigError(
            "--cpu-offloading-num-layers and --recompute-modules layernorm or moe_act exclude each other: what these "
            "parts still keep would not be offloaded; keep one of them"
        )
    if 0 < config.model.num_layers < recompute.cpu_offloading_num_layers:
        raise ConfigError(
            f"{spelled(config, 'cpu_offloading_num_layers')}: the model has {config.model.num_layers} layers; give "
            "at most this number"
        )
    if recompute.full and recompute.recompute_method is None:
        raise ConfigError("--recompute-granularity full: needs a method; add --recompute-method uniform (or block)")
    if recompute.full and 0 < config.model.num_layers < recompute.recompute_num_layers:
        raise ConfigError(
            f"{spelled(config, 'recompute_num_layers')} is more than {spelled(config, 'num_layers')}; "
            "give at most the number of layers"
        )


def check_kernels(config: RunConfig) -> None:
    kernels = config.kernels
    mode, *excluded = kernels.kernels.split(",")
    if mode not in ("auto", "native", "ref") or any(not word.startswith("-") or len(word) == 1 for word in excluded):
        raise ConfigError(
            f"{spelled(config, 'kernels')}: must be auto, native or ref, optionally followed by operations to exclude; "
            "use for example --kernels auto,-rope"
        )


CHECKS = (
    check_width,
    check_heads,
    check_positions,
    check_rope,
    check_window,
    check_precision,
    check_recompute,
    check_recomputed_parts,
    check_kernels,
)

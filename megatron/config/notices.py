"""Lines printed once at the start of a run, about settings that have no effect or an unexpected one."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator

from megatron.config.blend import parse_split
from megatron.config.run import RunConfig, settings_by_name
from megatron.config.values import show


def _like(pattern: str, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The settings that have an effect and are named so."""
    working = [name for name, setting in settings_by_name().items() if setting.flag.status == "works"]
    return tuple(name for name in fnmatch.filter(working, pattern) if name not in but)


_OF_DATA_FILES = ("split_rule", "max_epochs", "mmap_bin_files", "data_cache_path")


def _only_experts_of_own_width(config: RunConfig) -> bool:
    moe, layers = config.moe, config.model.num_layers
    return moe.is_on and moe.moe_ffn_hidden_size is not None and len(moe.expert_layers(layers)) == layers


def _has_validation_data(config: RunConfig) -> bool:
    """Or may have: a file that lists the sources is read later, and a script may bring its own."""
    data = config.data
    if data.train_data_path is not None:
        return data.valid_data_path is not None
    splits = data.mock_data or (data.data_path or data.data_args_path) is not None
    return not splits or parse_split(data.split)[1] > 0


# (condition for the message, whether it holds, settings that have no effect without it)
_NEEDS: tuple[tuple[str, Callable[[RunConfig], bool], tuple[str, ...]], ...] = (
    ("--optimizer adam", lambda c: c.optimizer.optimizer == "adam", ("adam_beta1", "adam_beta2", "adam_eps")),
    ("--optimizer sgd", lambda c: c.optimizer.optimizer == "sgd", ("sgd_momentum",)),
    (
        "--lr-decay-style WSD",
        lambda c: c.schedule.lr_decay_style == "WSD",
        _like("lr_wsd_*"),
    ),
    (
        "a warm-up",
        lambda c: bool(c.schedule.lr_warmup_iters or c.schedule.lr_warmup_samples or c.schedule.lr_warmup_fraction),
        ("lr_warmup_init",),
    ),
    (
        "a decay (--lr-decay-style other than constant)",
        lambda c: c.schedule.lr_decay_style != "constant",
        ("min_lr",),
    ),
    (
        "a decay or --lr-warmup-fraction",
        lambda c: c.schedule.lr_decay_style != "constant" or c.schedule.lr_warmup_fraction is not None,
        ("lr_decay_iters", "lr_decay_samples"),
    ),
    (
        "--fp16 and a dynamic loss scale",
        lambda c: c.precision.fp16 and c.precision.loss_scale is None,
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    ),
    ("normally distributed initial weights", lambda c: not c.model.init_method_xavier_uniform, ("init_method_std",)),
    ("positions", lambda c: c.model.positions != "none", ("reset_position_ids",)),
    ("rotary positions", lambda c: c.model.positions == "rope", ("rotary_percent", "rotary_base", "rope_fusion")),
    (
        "--use-rope-scaling",
        lambda c: c.model.rope_scaling == "llama3",
        ("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position"),
    ),
    ("--position-embedding-type yarn", lambda c: c.model.rope_scaling == "yarn", _like("yarn_*")),
    (
        "--num-experts",
        lambda c: c.moe.is_on,
        _like("moe_*", but=("moe_router_bias_update_rate", "moe_token_drop_policy")),
    ),
    (
        "--moe-router-load-balancing-type aux_loss or seq_aux_loss",
        lambda c: not c.moe.is_on or c.moe.moe_router_load_balancing_type != "none",
        ("moe_aux_loss_coeff",),
    ),
    (
        "--moe-aux-loss-coeff",
        lambda c: not c.moe.is_on or c.moe.balances or c.moe.moe_router_load_balancing_type == "none",
        ("moe_router_load_balancing_type",),
    ),
    (
        "a dense layer",
        lambda c: not _only_experts_of_own_width(c),
        ("ffn_hidden_size",),
    ),
    (
        "--moe-router-enable-expert-bias",
        lambda c: c.moe.moe_router_enable_expert_bias,
        ("moe_router_bias_update_rate",),
    ),
    (
        "--moe-expert-capacity-factor",
        lambda c: c.moe.moe_expert_capacity_factor is not None,
        ("moe_token_drop_policy",),
    ),
    ("--swiglu", lambda c: c.model.swiglu, ("bias_swiglu_fusion",)),
    ("--recompute-granularity full", lambda c: c.recompute.full, ("recompute_num_layers",)),
    (
        "several tensor-parallel ranks",
        lambda c: c.parallel.splits_sequence or not c.parallel.sequence_parallel,
        ("sequence_parallel",),
    ),
    ("--context-parallel-size", lambda c: c.parallel.context_parallel_size > 1, ("cp_comm_type",)),
    ("--fim-data", lambda c: c.data.fim_data, _like("fim_*", but=("fim_data",))),
    ("--dataloader-type cyclic", lambda c: c.data.dataloader_type == "cyclic", ("data_sharding",)),
    ("data files", lambda c: not c.data.mock_data, _OF_DATA_FILES),
    (
        "data files, or a share of 0",
        lambda c: not c.data.mock_data or not all(parse_split(c.data.split)),
        ("split",),
    ),
    (
        "--tokenizer-type TikTokenizer",
        lambda c: c.tokenizer.tokenizer_type == "TikTokenizer",
        ("tiktoken_num_special_tokens", "tiktoken_pattern"),
    ),
    (
        "--eval-iters above 0",
        lambda c: c.evaluation.eval_iters > 0,
        ("eval_interval", "full_validation", "eval_micro_batch_size"),
    ),
    (
        "validation data",
        lambda c: c.evaluation.eval_iters == 0 or _has_validation_data(c),
        ("eval_interval", "full_validation"),
    ),
    ("--timing-log-level 1 or 2", lambda c: c.logging.timing_log_level > 0, ("timing_log_option",)),
    ("--exit-signal-handler", lambda c: c.training.exit_signal_handler, ("exit_signal",)),
    ("--qk-layernorm", lambda c: c.model.qk_layernorm, ("apply_wd_to_qk_layernorm",)),
    (
        "--moe-router-score-function softmax",
        lambda c: not c.moe.is_on or c.moe.moe_router_score_function == "softmax",
        ("moe_router_pre_softmax",),
    ),
    ("--manual-gc", lambda c: c.training.manual_gc, ("manual_gc_interval", "manual_gc_eval")),
    (
        "--save",
        lambda c: c.checkpoint.save is not None,
        ("save_interval", "save_retain_interval", "save_optim", "save_rng", "save_tokenizer_assets"),
    ),
    (
        "--load",
        lambda c: c.checkpoint.load is not None,
        (
            *("load_optim", "load_rng", "strict_load", "skip_hash", "accept_changed_data"),
            *("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        ),
    ),
    (
        "--tensorboard-dir",
        lambda c: c.logging.tensorboard_dir is not None,
        (*_like("tensorboard_*", but=("tensorboard_dir",)), *_like("log_*_to_tensorboard")),
    ),
    (
        "--wandb-project",
        lambda c: c.logging.wandb_project is not None,
        _like("wandb_*", but=("wandb_project",)),
    ),
)


def given(config: RunConfig, name: str) -> bool:
    """Whether the user set it, by a flag or in a file. (A preset's values do not count.)"""
    origin = config.origins.get(name)
    return origin is not None and not origin.startswith("preset ")


def spelled(config: RunConfig, name: str) -> str:
    """A setting and its value as the user would type them."""
    setting = settings_by_name()[name]
    value = config.value(setting)
    if setting.is_switch:
        return setting.spelling if value != bool(setting.flag.off) else f"{setting.spelling}=false"
    return f"{setting.spelling} {show(value)}"


def notices_of(config: RunConfig) -> Iterator[str]:
    """The lines of this configuration; those of retired and no-op flags are made where they are read."""
    yield from _activation(config)
    yield from _attention(config)
    yield from _experts(config)
    yield from _iterations_to_skip(config)
    for needed, active, names in _NEEDS:
        if not active(config):
            for name in names:
                if given(config, name):
                    yield f"{spelled(config, name)}: has no effect without {needed}"


def _activation(config: RunConfig) -> Iterator[str]:
    model = config.model
    turned_off = given(config, "bias_gelu_fusion") and not model.bias_gelu_fusion
    if model.activation == "gelu_erf":
        cause = "--no-bias-gelu-fusion" if turned_off else "--disable-bias-linear"
        yield f"{cause}: GELU is computed in its erf form, as in Megatron; --openai-gelu keeps the tanh form"
    elif turned_off:
        yield f"--no-bias-gelu-fusion: has no effect on the activation, which is {model.activation}"


def _attention(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.use_rotary_position_embeddings:
        yield "--use-rotary-position-embeddings: taken as --position-embedding-type rope, without a learned table"
    if given(config, "num_query_groups") and not model.group_query_attention:
        yield f"{spelled(config, 'num_query_groups')}: turns grouped-query attention on"


def _experts(config: RunConfig) -> Iterator[str]:
    if config.moe.balances and config.moe.balanced_over == "micro-batch":
        yield (
            f"{spelled(config, 'moe_router_load_balancing_type')}: looks at the tokens of a micro-batch together, so "
            "training depends on --micro-batch-size; seq_aux_loss does not"
        )


def _iterations_to_skip(config: RunConfig) -> Iterator[str]:
    skipped, length = config.training.iterations_to_skip or (), config.training.train_iters
    beyond = [number for number in skipped if number < 1 or (length is not None and number > length)]
    if beyond:
        yield f"--iterations-to-skip {show(beyond)}: no such iterations; they are counted from 1 to --train-iters"

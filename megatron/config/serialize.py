"""Converts RunConfig to and from plain dicts (in checkpoints), and to the table of --print-config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.config.flag import Setting
from megatron.config.run import SECTIONS, RunConfig, all_settings, build, settings_by_name
from megatron.config.values import parse_switch, parse_value, show
from megatron.errors import ConfigError, printable


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Returns {section: {field: value}} of plain values and lists, without settings that are `cli_only`."""
    plain: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting in all_settings():
        if not setting.flag.cli_only:
            value = config.value(setting)
            plain[setting.section][setting.name] = list(value) if isinstance(value, tuple) else value
    return plain


def from_dict(plain: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Restores a RunConfig from `to_dict`. Missing fields get their default; unknown ones raise a ConfigError."""
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for section, fields in plain.items():
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"checkpoint: its section {section[:60]} is a {type(fields).__name__}, not a dict of settings"
            )
        for name, value in fields.items():
            setting = settings_by_name().get(name)
            if setting is None or setting.section != section:
                unknown.append(f"{section}.{name} = {show(value)}")
            elif setting.is_switch:
                values[name] = parse_switch(setting, value)
            elif value is None:
                values[name] = None
            elif value == setting.default:
                values[name] = setting.default
            else:
                values[name] = parse_value(setting, value)
    if unknown:
        raise ConfigError(
            f"checkpoint: this version does not know {', '.join(unknown)}; use the version that wrote the checkpoint"
        )
    return build(values, origins=dict.fromkeys(values, "checkpoint"))


# --use-checkpoint-args adopts these sections, which define the function that the weights were trained for. The fields
# below are excepted, because they affect only training.
_ADOPTED_SECTIONS = ("model", "moe", "tokenizer")
_DROPOUT = ("attention_dropout", "hidden_dropout")
_NOT_ADOPTED = (
    "model",
    *_DROPOUT,
    "init_method_std",
    "init_method_xavier_uniform",
    "make_vocab_size_divisible_by",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
)


# Under --finetune the user's value replaces the checkpoint's, because these settings affect no tensor. (Loading rejects
# a different number of learned positions.)
_LENGTH_OF_THE_RUN = (
    "seq_length",
    "max_position_embeddings",
    "window_size",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position",
    "yarn_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_attention_factor",
)
_FILES_OF_THE_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")

PRECEDENCE = (
    "A later source wins: default, preset, file, flag. With --use-checkpoint-args or a Hugging Face model in --load, "
    "the checkpoint gives the model's shape, its experts, the tokenizer and any sequence length. A flag with another "
    "value is rejected. With --finetune, flags may change the sequence length, the positions and the tokenizer. "
    "Dropout, initial values, expert balancing, batch sizes and learning rates never come from the checkpoint."
)


def adopt_checkpoint_args(
    config: RunConfig,
    saved: Mapping[str, Mapping[str, Any]],
    way_out: str = "remove that setting, or --use-checkpoint-args",
) -> RunConfig:
    """Applies --use-checkpoint-args as `PRECEDENCE` states. `way_out`: the fix for a flag that disagrees."""
    loaded = from_dict(saved)
    changes: dict[str, dict[str, Any]] = {}
    origins = dict(config.origins)
    for setting in all_settings():
        if not _is_adopted(setting, config, saved):
            continue
        mine, theirs = config.value(setting), loaded.value(setting)
        if setting.name in origins and mine != theirs:
            if config.checkpoint.finetune and setting.name in _LENGTH_OF_THE_RUN:
                continue
            raise ConfigError(
                f"{setting.spelling} {show(mine)} ({origins[setting.name]}) and {show(theirs)} of the checkpoint "
                f"disagree; {way_out}"
            )
        changes.setdefault(setting.section, {})[setting.name] = theirs
        origins[setting.name] = "checkpoint"
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in changes.items()}
    lines = [
        f"{setting.spelling} {show(config.value(setting))} is the default, but the checkpoint was trained "
        f"with {show(loaded.value(setting))}; give {setting.spelling} to choose a value"
        for setting in map(settings_by_name().__getitem__, _DROPOUT)
        if setting.name not in origins and config.value(setting) != loaded.value(setting)
    ]
    adopted = dataclasses.replace(config, **sections, origins=origins)
    lines += _raised_positions(loaded, adopted)
    if adopted.moe.weight_is_always_one:
        lines.append(
            "--moe-router-topk 1 of the checkpoint: the softmax over one expert is 1, so the router learns only "
            "from the load-balance loss"
        )
    return dataclasses.replace(adopted, notices=(*config.notices, *lines))


def _raised_positions(loaded: RunConfig, adopted: RunConfig) -> list[str]:
    """Returns a notice if the run's context is longer than the checkpoint's. Only RoPE models allow this, because none
    of their tensors depends on the length."""
    theirs, ours = loaded.model, adopted.model
    if theirs.positions != "rope" or not 0 < theirs.max_position_embeddings < ours.max_position_embeddings:
        return []
    line = f"{theirs.max_position_embeddings} positions of the checkpoint raised to {ours.max_position_embeddings}"
    return [line if ours.rotary_base != theirs.rotary_base else f"{line}; the RoPE base is unchanged"]


def _is_adopted(setting: Setting, config: RunConfig, saved: Mapping[str, Mapping[str, Any]]) -> bool:
    if setting.name == "seq_length":
        return "seq_length" in saved.get("data", {})  # an imported model has none
    other_tokenizer = config.checkpoint.finetune and any(name in config.origins for name in _FILES_OF_THE_TOKENIZER)
    if setting.section == "tokenizer" and other_tokenizer:
        return setting.name == "vocab_size" and config.tokenizer.kind != "NullTokenizer"
    return setting.section in _ADOPTED_SECTIONS and setting.name not in _NOT_ADOPTED


def describe(config: RunConfig) -> str:
    """Returns the output of --print-config: all values with their origins and the precedence of sources, or YAML."""
    if config.runtime.prints_yaml:
        return _as_yaml(config)
    rows = [("setting", "value", "from")]
    for section in SECTIONS:
        changed = [setting for setting in _of_section(section) if _is_changed(config, setting)]
        shown = changed if config.runtime.print_config_changed else _of_section(section)
        rows += [(f"[{section}]", "", "")] if shown else []
        for setting in shown:
            value, origin = show(config.value(setting)), config.origins.get(setting.name, "default")
            rows.append((setting.name, printable(value), printable(origin)))
    width = [max(len(row[column]) for row in rows) for column in range(2)]
    width[1] = min(width[1], 60)
    table = [f"{name:<{width[0]}}  {value:<{width[1]}}  {origin}".rstrip() for name, value, origin in rows]
    return "\n".join([*table, PRECEDENCE])


def _of_section(section: str) -> list[Setting]:
    return [setting for setting in all_settings() if setting.section == section]


def _is_changed(config: RunConfig, setting: Setting) -> bool:
    return config.value(setting) != setting.default


def _as_yaml(config: RunConfig) -> str:
    """Returns YAML that --config reads back to the same settings. Omits values that a preset or checkpoint gives."""
    import yaml  # here, because other output needs no YAML

    sections: dict[str, dict[str, Any]] = {}
    for setting in all_settings():
        origin, value = config.origins.get(setting.name), config.value(setting)
        follows = origin is not None and origin.startswith(("preset ", "checkpoint"))
        if setting.flag.cli_only or follows or value is None or not (origin or _is_changed(config, setting)):
            continue
        sections.setdefault(setting.section, {})[setting.name] = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)).rstrip("\n")

"""Every key of the table does what the page says. Expected values are written by hand, not read from the table."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron.compat.deepspeed_file import read_deepspeed
from megatron.compat.deepspeed_file.keys import Key, Kind
from megatron.compat.deepspeed_file.members import members_of
from megatron.compat.deepspeed_file.table import GROUPS, children, keys_by_path
from megatron.config.flag import Setting
from megatron.config.run import settings_by_name
from megatron.config.sources import canonical_spellings, spelling_table
from megatron.errors import ConfigError


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """Converts keys with dots to nested blocks."""
    content: dict[str, Any] = {}
    for path, value in pairs:
        *blocks, name = path.split(".")
        inner = content
        for one in blocks:
            inner = inner.setdefault(one, {})
        inner[name] = value
    return content


ADAM, SGD = ("optimizer.type", "AdamW"), ("optimizer.type", "SGD")
FP16, OFFLOAD = ("fp16.enabled", True), "zero_optimization.offload_optimizer."
# key -> (its value, keys that it needs beside it, the fields that it sets)
SETS: dict[str, tuple[Any, tuple[tuple[str, Any], ...], dict[str, Any]]] = {
    "train_batch_size": (48, (), {"global_batch_size": 48}),
    "train_micro_batch_size_per_gpu": (3, (), {"micro_batch_size": 3}),
    "gradient_accumulation_steps": (5, (), {"gradient_accumulation_steps": 5}),
    "optimizer.type": ("SGD", (), {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}),
    "optimizer.params.lr": (0.25, (ADAM,), {"lr": 0.25}),
    "optimizer.params.betas": ([0.7, 0.8], (ADAM,), {"adam_beta1": 0.7, "adam_beta2": 0.8}),
    "optimizer.params.eps": (1e-5, (ADAM,), {"adam_eps": 1e-5}),
    "optimizer.params.weight_decay": (0.3, (ADAM,), {"weight_decay": 0.3}),
    "optimizer.params.momentum": (0.4, (SGD,), {"sgd_momentum": 0.4}),
    "optimizer.params.adam_w_mode": (False, (("optimizer.type", "Adam"),), {"decoupled_weight_decay": False}),
    "optimizer.params.muon_lr": (0.25, (("optimizer.type", "Muon"),), {"lr": 0.25}),
    "optimizer.params.adam_lr": (0.25, (("optimizer.type", "Muon"),), {"lr": 0.25}),
    "scheduler.type": ("WarmupLR", (), {"lr_schedule": "WarmupLR"}),
    "scheduler.params.total_num_steps": (77, (), {"total_num_steps": 77}),
    "scheduler.params.warmup_min_lr": (0.5, (), {"warmup_min_lr": 0.5}),
    "scheduler.params.warmup_max_lr": (0.6, (), {"warmup_max_lr": 0.6}),
    "scheduler.params.warmup_num_steps": (7, (), {"warmup_num_steps": 7}),
    "scheduler.params.warmup_type": ("linear", (), {"warmup_type": "linear"}),
    "scheduler.params.warmup_min_ratio": (0.1, (), {"warmup_min_ratio": 0.1}),
    "scheduler.params.cos_min_ratio": (0.2, (), {"cos_min_ratio": 0.2}),
    "scheduler.params.cycle_min_lr": (0.3, (), {"cycle_min_lr": 0.3}),
    "scheduler.params.cycle_max_lr": (0.4, (), {"cycle_max_lr": 0.4}),
    "scheduler.params.decay_lr_rate": (0.5, (), {"decay_lr_rate": 0.5}),
    "scheduler.params.cycle_first_step_size": (8, (), {"cycle_first_step_size": 8}),
    "scheduler.params.cycle_second_step_size": (9, (), {"cycle_second_step_size": 9}),
    "scheduler.params.cycle_first_stair_count": (2, (), {"cycle_first_stair_count": 2}),
    "scheduler.params.cycle_second_stair_count": (3, (), {"cycle_second_stair_count": 3}),
    "scheduler.params.decay_step_size": (4, (), {"decay_step_size": 4}),
    "scheduler.params.lr_range_test_min_lr": (0.7, (), {"lr_range_test_min_lr": 0.7}),
    "scheduler.params.lr_range_test_step_size": (6, (), {"lr_range_test_step_size": 6}),
    "scheduler.params.lr_range_test_step_rate": (0.8, (), {"lr_range_test_step_rate": 0.8}),
    "scheduler.params.lr_range_test_staircase": (True, (), {"lr_range_test_staircase": True}),
    "fp16.enabled": (True, (), {"fp16": True, "initial_loss_scale": 65536.0}),
    "fp16.loss_scale": (128, (FP16,), {"loss_scale": 128.0}),
    "fp16.initial_scale_power": (12, (FP16,), {"initial_loss_scale": 4096.0}),
    "fp16.loss_scale_window": (50, (FP16,), {"loss_scale_window": 50}),
    "fp16.hysteresis": (4, (FP16,), {"hysteresis": 4}),
    "fp16.consecutive_hysteresis": (True, (FP16,), {"consecutive_hysteresis": True}),
    "fp16.min_loss_scale": (2, (FP16,), {"min_loss_scale": 2.0}),
    "bf16.enabled": (True, (), {"bf16": True}),
    "bfloat16.enabled": (True, (), {"bf16": True}),
    "gradient_clipping": (0.5, (), {"clip_grad": 0.5}),
    "communication_data_type": ("bf16", (), {"grad_reduce_in_bf16": True}),
    "zero_optimization.reduce_bucket_size": (5e7, (), {"ddp_bucket_size": 50_000_000}),
    "zero_optimization.stage": (1, (), {"zero_stage": 1}),
    "zero_optimization.overlap_comm": (True, (), {"overlap_grad_reduce": True}),
    OFFLOAD + "device": ("cpu", (), {"optimizer_cpu_offload": True}),
    OFFLOAD + "ratio": (0.5, (), {"optimizer_offload_fraction": 0.5}),
    "zero_optimization.cpu_offload": (True, (), {"optimizer_cpu_offload": True}),
    "zero_optimization.offload_param.device": ("cpu", (), {"remote_device": "cpu"}),
    "zero_optimization.cpu_offload_param": (True, (), {"remote_device": "cpu"}),
    "zero_optimization.cpu_offload_params": (True, (), {"remote_device": "cpu"}),
    "steps_per_print": (11, (), {"log_interval": 11}),
    "wall_clock_breakdown": (True, (), {"timing_log_level": 1}),
    "tensorboard.enabled": (True, (), {"tensorboard_dir": "DeepSpeedJobName"}),
    "tensorboard.output_path": ("tb/", (("tensorboard.enabled", True),), {"tensorboard_dir": "tb/DeepSpeedJobName"}),
    "tensorboard.job_name": ("mine", (("tensorboard.enabled", True),), {"tensorboard_dir": "mine"}),
    "wandb.enabled": (True, (), {"wandb_project": "deepspeed"}),
    "wandb.project": ("p", (("wandb.enabled", True),), {"wandb_project": "p"}),
    "wandb.team": ("t", (("wandb.enabled", True),), {"wandb_entity": "t"}),
    "activation_checkpointing.partition_activations": (True, (), {"distribute_saved_activations": True}),
}
# Decided with others, and setting no field of their own: see test_read.py.
JOINT = {
    OFFLOAD + "nvme_path",
}
ROWS = list(keys_by_path().values())
ANY = {"switch": True, "whole": 9, "number": 0.5, "text": "x", "list": [1], "block": {"enabled": True}}


def on(key: Key) -> tuple[tuple[str, Any], ...]:
    """Switches on the switch of a key's block."""
    switch = f"{key.path.rpartition('.')[0]}.enabled"
    return ((switch, True),) if switch in keys_by_path() and switch != key.path else ()


def test_every_key_that_sets_something_is_expected_here() -> None:
    acting = {key.path for key in ROWS if not (key.line or key.way_out or key.has_rows)}
    assert acting == SETS.keys() | JOINT
    assert sum(len(group) for group in GROUPS.values()) == len(ROWS)


def is_built(fields: dict[str, Any]) -> bool:
    return all(settings_by_name()[name].flag.status == "works" for name in fields)


@pytest.mark.parametrize("path", SETS)
def test_a_key_sets_its_field_and_no_other(path: str) -> None:
    value, beside, fields = SETS[path]
    content = nested(*beside, (path, value))
    if not is_built(fields):
        with pytest.raises(ConfigError, match=rf"{path} .*: not supported yet"):
            read_deepspeed(content)
        return
    without = read_deepspeed(nested(*beside)).values
    found = read_deepspeed(content)
    for name, wanted in fields.items():
        assert found.values[name] == wanted
        assert wanted != settings_by_name()[name].default, "the example shows nothing"
        assert path in found.spelled[name] or wanted == 65536.0 or "without" in found.spelled[name]
    assert {name for name in found.values if found.values[name] != without.get(name)} == fields.keys()
    assert found.content[path] == value


@pytest.mark.parametrize("key", [key for key in ROWS if key.line], ids=lambda key: key.path)
def test_a_key_without_effect_says_why_and_sets_nothing(key: Key) -> None:
    beside = read_deepspeed(nested(*on(key))).values
    found = read_deepspeed(nested(*on(key), (key.path, ANY[key.kind])), name="ds.json")
    assert any(line.startswith(f"ds.json: {key.path}") and line.endswith(key.line) for line in found.notices)
    assert found.values == beside
    if key.kind == "block":
        assert read_deepspeed(nested((key.path, {"enabled": False}))).notices == []


@pytest.mark.parametrize("key", [key for key in ROWS if key.way_out], ids=lambda key: key.path)
def test_a_key_that_would_change_the_result_is_refused_by_name(key: Key) -> None:
    asks = ANY[key.kind] if ANY[key.kind] not in key.neutral else False
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(nested(*on(key), (key.path, asks)), name="ds.json")
    assert str(caught.value).startswith(f"in ds.json: {key.path}") and key.way_out in str(caught.value)
    for neutral in key.neutral or ({"enabled": False},) * (key.kind == "block"):
        assert read_deepspeed(nested(*on(key), (key.path, neutral))).notices == []


@pytest.mark.parametrize("key", [key for key in ROWS if key.kind != "block"], ids=lambda key: key.path)
def test_another_type_is_refused_by_name_and_auto_and_null_say_nothing(key: Key) -> None:
    for wrong in [{}] if key.kind == "list" else [[1], {}]:
        with pytest.raises(ConfigError, match=rf"in ds.json: {key.path} .*: not (a|true|text)"):
            read_deepspeed(nested((key.path, wrong)), name="ds.json")
    for nothing in ("auto", None):
        found = read_deepspeed(nested((key.path, nothing)))
        assert not found.values and not found.notices and not found.content


def test_flags_that_the_table_names_exist_and_work() -> None:
    known, table, wrong = canonical_spellings(), spelling_table(), []
    for key in ROWS:
        for named in re.findall(r"--[a-z][\w-]*\b", f"{key.line} {key.way_out} {key.meaning}"):
            target = table.get(known.get(named.replace("_", "-"), ""))
            if not isinstance(target, Setting) or target.flag.status in ("later", "never"):
                wrong.append((key.path, named))
    assert wrong == []


OFF: list[dict[str, Any]] = [{"enabled": False}, {"enabled": None}, {"enabled": "auto"}, {}]
SWITCHED = [
    (key.path, off, key.has_rows)
    for key in ROWS
    for off in OFF
    if (f"{key.path}.enabled" in keys_by_path() if key.has_rows else key.kind == "block" and off)
]


def keys_in(block: str, has_rows: bool) -> dict[str, Kind]:
    """Keys of a block; without rows, those of inner blocks too, and `text` for a value of any type."""
    if has_rows:
        return {name: keys_by_path()[f"{block}.{name}"].kind for name in children(block)}
    found: dict[str, Kind] = {}
    for name, kind in members_of(block).items():
        found[name] = kind or "text"
        found |= {f"{name}.{inner}": of for inner, of in keys_in(f"{block}.{name}", has_rows=False).items()}
    return found


@pytest.mark.parametrize(("block", "off", "has_rows"), SWITCHED)
def test_a_block_that_is_off_names_its_keys_and_refuses_others(block: str, off: dict[str, Any], has_rows: bool) -> None:
    for name, kind in keys_in(block, has_rows).items():
        if name == "enabled":
            continue
        found = read_deepspeed(nested((block, {**off, **nested((name, ANY[kind]))})), name="ds.json")
        assert found.notices == [
            f"ds.json: {block}.{name.partition('.')[0]}: no effect while {block}.enabled is not true",
        ]
        assert not set(found.values) - {"fp16", "bf16"} and not any(found.values.values())
        wrong = nested((block, {**off, **nested((f"{name}x", ANY[kind]))}))
        with pytest.raises(ConfigError, match=rf"^in ds.json: {block}.{name}x: unknown key"):
            read_deepspeed(wrong, name="ds.json")


@pytest.mark.parametrize("key", [key for key in ROWS if not key.has_rows], ids=lambda key: key.path)
def test_no_key_alone_is_ignored_silently(key: Key) -> None:
    """A key without its switch, type or device still gives a value, a line or an error."""
    asks = ANY[key.kind] if ANY[key.kind] not in key.neutral else False
    try:
        found = read_deepspeed(nested((key.path, asks)))
    except ConfigError:
        return
    assert found.values or found.notices

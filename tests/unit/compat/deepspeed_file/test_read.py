"""Keys that are read together, and mistakes in a configuration: one line that names the key and the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.compat.deepspeed_file import read_deepspeed
from megatron.errors import ConfigError


def refusal(content: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(content, name="ds.json")
    (line,) = caught.value.lines
    assert "\n" not in line and line.startswith("in ds.json: ")
    return line.removeprefix("in ds.json: ")


def notices(content: dict[str, Any]) -> list[str]:
    return [line.removeprefix("config: ") for line in read_deepspeed(content).notices]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"train_batchsize": 4}, "train_batchsize: unknown key (did you mean train_batch_size?)"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge: unknown key (did you mean stage?)"),
        ({"stage": 1}, "stage: unknown key (it belongs to zero_optimization)"),
        ({"fp16": {"gradient_clipping": 1}}, "fp16.gradient_clipping: unknown key (it belongs to the top level)"),
        ({"fp16.enabled": True}, "fp16.enabled: unknown key"),
        ({3: 4}, "3: unknown key"),
        ({"a\nb": 1}, "'a\\nb': unknown key"),
        ({"x" * 500: 1}, "x" * 80 + ": unknown key"),
        ({"zero_allow_untrusted_optimizer": True}, "(did you mean zero_allow_untested_optimizer?)"),
        (
            {"flops_profiler": {"profile_stp": 1}},
            "flops_profiler.profile_stp: unknown key (did you mean profile_step?)",
        ),
        ({"flops_profiler": {"profile_step": "1"}}, 'flops_profiler.profile_step "1": not a whole number'),
        ({"train_batch_size": "16"}, 'train_batch_size "16": not a whole number'),
        ({"train_batch_size": 16.5}, "train_batch_size 16.5: not a whole number"),
        ({"train_batch_size": True}, "train_batch_size true: not a whole number"),
        ({"train_batch_size": 10**5000}, "train_batch_size 0x"),
        ({"train_batch_size": 0}, "train_batch_size 0: out of range"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping nan: not a finite number"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping inf: not a finite number"),
        ({"fp16": True}, "fp16 true: not a block of keys"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled 1: not true or false"),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type AdamV: not supported (did you mean Adam?)"),
        ({"optimizer": {"params": {"lr": 1}}}, 'optimizer.params: optimizer.type is missing; add "type": "AdamW"'),
        ({"optimizer": {"type": "SGD", "params": {"eps": 1e-8}}}, "optimizer.params.eps 1e-08: SGD has no such"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas: not 2 numbers"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, "x"]}}}, "optimizer.params.betas: not 2 numbers"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5]}}},
            "optimizer.params.betas [0.9, 1.5]: 1.5: out of range; give a number of at least 0 and below 1",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode false: AdamW always decouples weight decay; remove it, or use the type Adam",
        ),
        (
            {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.5, "adam_lr": 0.25}}},
            "optimizer.params.muon_lr 0.5 and optimizer.params.adam_lr 0.25: one rate is used for all parameters",
        ),
        ({"optimizer": {"type": "Lion", "params": {"adam_lr": 0.5}}}, "optimizer.params.adam_lr 0.5: Lion has no such"),
        ({"scheduler": {"type": "WarmupLRs"}}, "scheduler.type WarmupLRs: no such choice"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 5000}},
            "fp16.initial_scale_power 5000: not supported; give",
        ),
        (
            {"communication_data_type": "fp16"},
            "communication_data_type fp16: not supported; gradients are reduced in",
        ),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bf16.enabled true and bfloat16.enabled false"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
            "offload_optimizer.device gpu: no such device",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device nvme: needs a directory; add nvme_path",
        ),
        (
            {"tensorboard": {"output_path": "a\x00b", "enabled": True}},
            "tensorboard.output_path 'a\\x00b': not printable",
        ),
    ],
)
def test_a_mistake_is_one_line(content: dict[str, Any], said: str) -> None:
    line = refusal(content)
    assert said in line and len(line) < 400


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed({"train_batch_size": "a", "fp16": {"enabled": 3}, "bogus": 1})
    assert len(caught.value.lines) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": 8 // samples\n}', "not valid JSON (line 1, column 24: JSON has no comments, remove it)"),
        ('{\n# a comment\n"fp16": {}}', "line 2, column 1: JSON has no comments"),
        ('{/* a */ "fp16": {}}', "JSON has no comments"),
        ('{"fp16": {},}', "not valid JSON (line 1"),
        ("", "not valid JSON (line 1, column 1"),
        ('{"fp16": {}, "fp16": {}}', "fp16 is set twice; keep one"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "stage is set twice; keep one"),
        ('{"train_batch_size": NaN}', "train_batch_size nan: not a finite number"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping inf: not a finite number"),
        ('{"train_batch_size": ' + "1" * 5000 + "}", "train_batch_size inf: not a finite number"),
        ('{"train_batch_size": ' + "1" * 250 + "}", "train_batch_size 0x"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[1]", "not an object of keys"),
        ('{"fp16": {"enabled": tru}}', "not valid JSON"),
        ("{" + " " * (1 << 20) + "}", "larger than 1048576 bytes"),
    ],
)
def test_a_strange_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(file)
    (line,) = caught.value.lines
    assert said in line and str(file) in line and "\n" not in line and len(line) < 400 + len(str(file))


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--deepspeed_config .*: no such file; give the path of a JSON file"):
        read_deepspeed(tmp_path)
    (tmp_path / "ds.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_deepspeed(tmp_path / "ds.json")
    (tmp_path / "ds.json").write_bytes(b"\xef\xbb\xbf" + b'{"train_batch_size": 8}')
    assert read_deepspeed(tmp_path / "ds.json").values == {"global_batch_size": 8}


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ({"type": "AdamW"}, {"optimizer": "adam"}),  # 0.01, our default
        ({"type": "adam"}, {"optimizer": "adam", "weight_decay": 0.0}),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
            {"optimizer": "adam", "weight_decay": 0.1, "decoupled_weight_decay": False},
        ),
        (
            {"type": "SGD", "params": {"lr": 1}},
            {"optimizer": "sgd", "weight_decay": 0.0, "sgd_momentum": 0.0, "lr": 1.0},
        ),
        (
            {"type": "Lion", "params": {"betas": [0.5, 0.6]}},
            {"optimizer": "lion", "weight_decay": 0.0, "lion_beta1": 0.5, "lion_beta2": 0.6},
        ),
        ({"type": "Lion"}, {"optimizer": "lion", "weight_decay": 0.0, "lion_beta1": 0.9, "lion_beta2": 0.99}),
        (
            {"type": "Muon", "params": {"lr": 0.5, "muon_lr": 0.5, "ns_method": "gram"}},
            {
                **{"optimizer": "muon", "weight_decay": 0.0, "muon_momentum": 0.95, "muon_nesterov": True, "lr": 0.5},
                **{"muon_scale_mode": "shape_scaling", "muon_coefficient_type": "simple"},
            },
        ),
    ],
)
def test_what_an_optimizer_leaves_out_is_what_its_class_has(block: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert dict(read_deepspeed({"optimizer": block}).values) == wanted


def test_a_loss_scale_of_zero_is_dynamic() -> None:
    found = read_deepspeed({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32}}).values
    assert found == {"fp16": True, "loss_scale": None, "initial_loss_scale": 2.0**32}
    assert "initial_loss_scale" not in read_deepspeed({"fp16": {"enabled": True, "loss_scale": 64}}).values


def test_a_block_that_is_off_has_no_effect_and_says_so() -> None:
    content = {"fp16": {"enabled": False, "loss_scale": 4, "hysteresis": "auto", "initial_scale_power": 3}}
    assert dict(read_deepspeed(content).values) == {"fp16": False}
    said = "fp16.loss_scale, fp16.initial_scale_power: no effect while fp16.enabled is not true"
    assert notices(content) == [said]
    assert "unknown key" in refusal({"fp16": {"enabled": False, "losscale": 4}})
    assert notices({"tensorboard": {"enabled": False, "output_path": "x"}})


def test_the_boolean_of_old_files_is_a_stage() -> None:
    assert json.dumps(read_deepspeed({"zero_optimization": False}).content) == '{"zero_optimization.stage": 0}'


def test_the_optimizer_in_a_file_has_its_directory() -> None:
    offload = {"device": "nvme", "nvme_path": "/scratch/here"}
    read = read_deepspeed({"zero_optimization": {"offload_optimizer": offload}})
    assert read.values["optimizer_offload_directory"] == "/scratch/here"
    (line,) = notices({"zero_optimization": {"offload_optimizer": {**offload, "device": "none"}}})
    assert "nvme_path /scratch/here: no effect" in line

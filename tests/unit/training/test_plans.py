"""`--dry-run` counts equal layers, stages and experts instead of making them, and plans every accepted size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config import ParallelConfig, parse_args
from megatron.config.run import Setting, all_settings
from megatron.distributed.launch import LaunchInfo
from megatron.training import dry_run
from tests.helpers.runs import flags, make_run, pretrain_gpt, pretrain_here

SIZES = {setting.spelling: setting for setting in all_settings() if setting.largest is not None}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "num_layers": 4, "disable_bias_linear": True}
MODELS: list[dict[str, Any]] = [
    {"swiglu": True, "moe_ffn_hidden_size": 48},
    {"moe_shared_expert_intermediate_size": 40, "untie_embeddings_and_output_weights": True},
    {"moe_layer_freq": "[0,1,1,0]", "bf16": True, "use_distributed_optimizer": True},
    {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
]
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
]


def plan(ranks: int, **settings: Any) -> str:
    config = parse_args(flags(**settings))
    run = make_run(replace(config, parallel=ParallelConfig()))
    run = replace(run, config=config, launch=LaunchInfo(world_size=ranks, local_world_size=ranks))
    return dry_run.render_plan(run, pretrain_gpt().model_provider)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(("ranks", "axes"), LAYOUTS)
def test_one_expert_is_counted_as_all_of_them(
    ranks: int, axes: dict[str, Any], model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan(ranks, **{**EXPERTS, **model}, **axes)
    monkeypatch.setattr(dry_run, "_BUILT", 0)
    assert plan(ranks, **{**EXPERTS, **model}, **axes) == whole


@pytest.mark.parametrize("setting", SIZES.values(), ids=SIZES)
def test_the_largest_value_of_a_setting_is_planned_or_rejected(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rejections have one line. The suite's time limit applies: a plan that counts one by one would take minutes."""
    assert setting.largest is not None
    many = setting.flag.nargs if isinstance(setting.flag.nargs, int) else 1
    code = pretrain_here([*flags(), setting.spelling, *[str(int(setting.largest))] * many, "--dry-run"])
    told = capsys.readouterr()
    if code:
        assert code == 2 and told.err.startswith("error: "), told.err
    else:
        assert "dry run: all settings are valid" in told.out


STRANGE = f"a\x1b[31m\nerror: forged {'b' * 100_000}"
QUOTED = ("fim-split-sample", "fim-eod-token", "moe-layer-freq", "wandb-exp-name", "async-strategy", "cuda-graph-scope")
"""Text settings whose value a notice quotes literally."""


@pytest.mark.parametrize("way", ["--dry-run", "--print-config"])
def test_what_quotes_a_value_is_lines_without_its_control_characters(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name in QUOTED for word in (f"--{name}", STRANGE)]
    again = ["--wandb-entity", STRANGE, "--wandb-entity", f"{STRANGE}b", "--data-cache-path", "https://me:pw@host/x"]
    assert pretrain_here([*flags(), *words, *again, way]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert sum(line.count("\\x1b[31m\\nerror: forged bbb") for line in lines) > len(QUOTED)
    assert all(line.isprintable() and len(line) < 2500 for line in lines)
    assert not any("pw" in line for line in lines)

"""The table of TrainingArguments on docs/from_transformers.md is complete, and its answers are true."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch

from megatron.config.other_programs import answers, given_elsewhere
from megatron.config.sections.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.sources import canonical_spellings, spelling_table
from megatron.optimizer.lr_schedule import Curves, build_schedule
from tests.docs.blocks import ROOT

transformers = pytest.importorskip("transformers")

PAGE = (ROOT / "docs" / "from_transformers.md").read_text(encoding="utf-8")
TABLES = PAGE.split("\n## Every field of TrainingArguments\n")[1].split("\n## ")[0]
ROWS: list[tuple[str, str, str]] = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", TABLES, re.M)
FIELD = {field: (here, why) for field, here, why in ROWS}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SETTINGS = re.compile(r"`--\S+( [\w-]+)?`(, `--\S+( [\w-]+)?`)*")
OF_TOOLS = {"--to", "--ckpt-step", "--json-keys", "--no-safe-serialization"}
ONLY_IN_4_57 = re.findall(
    r"\w+",
    """
    overwrite_output_dir per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio logging_dir save_safetensors
    no_cuda use_mps_device jit_mode_eval fp16_opt_level half_precision_backend tpu_num_cores tpu_metrics_debug
    past_index fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap adafactor group_by_length
    use_legacy_prediction_loop include_inputs_for_metrics fp16_backend push_to_hub_model_id push_to_hub_organization
    push_to_hub_token mp_parameters torchdynamo ray_scope include_tokens_per_second
    """,
)


def flags_in(text: str) -> set[str]:
    return set(FLAG.findall(text)) - OF_TOOLS


def test_each_field_has_one_row() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init}
    rows = [field for field, _, _ in ROWS]
    assert fields - set(rows) == set(), "fields without a row"
    assert set(ONLY_IN_4_57) - set(rows) == set()
    assert sorted(rows) == sorted(set(rows)), "fields with two rows"


def test_each_row_answers_with_flags_that_exist() -> None:
    known = spelling_table()
    for field, (here, why) in FIELD.items():
        assert flags_in(here + why) <= known.keys(), field
        assert here in ("always", "not here") or SETTINGS.fullmatch(here), field


@pytest.mark.parametrize("field", [field for field in FIELD if field.replace("_", "-") in answers()])
def test_a_row_agrees_with_the_suggestion_for_the_typed_name(field: str) -> None:
    """A row has the flags of the suggestion. A sentence without a flag is a row without one."""
    suggestion, (here, why) = answers()[field.replace("_", "-")], FIELD[field]
    assert flags_in(suggestion) <= flags_in(here + why), suggestion
    if not flags_in(suggestion):
        assert here in ("always", "not here"), suggestion
    if suggestion.startswith("--") and " or " not in suggestion:
        assert flags_in(suggestion) <= flags_in(here), suggestion


def test_each_field_that_is_no_flag_here_has_an_answer() -> None:
    typed = {field: f"--{field.replace('_', '-')}" for field in FIELD}
    unknown = [field for field, flag in typed.items() if flag not in canonical_spellings()]
    assert len(unknown) > 100
    assert not [field for field in unknown if given_elsewhere(typed[field]) is None]


def test_a_field_with_a_flag_of_its_name_has_it() -> None:
    for field, (here, _) in FIELD.items():
        own = f"--{field.replace('_', '-')}"
        assert own not in spelling_table() or own in flags_in(here), field


SCHEDULES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("linear", "linear"): ({}, {}),
    ("cosine", "cosine"): ({}, {}),
    ("cosine_with_min_lr", "cosine"): ({"min_lr": 1e-4}, {"min_lr": 1e-4}),
    ("constant_with_warmup", "constant"): ({}, {}),
    ("inverse_sqrt", "inverse-square-root"): ({}, {}),
    ("warmup_stable_decay", "WSD"): (
        {"num_decay_steps": 20, "decay_type": "1-sqrt"},
        {"wsd_decay_steps": 20, "lr_wsd_decay_style": "minus_sqrt"},
    ),
}


@pytest.mark.parametrize("pair", SCHEDULES, ids="-".join)
def test_rates_called_equal_are_equal(pair: tuple[str, str]) -> None:
    (theirs, ours), (given, settings) = pair, SCHEDULES[pair]
    assert re.search(rf"^\| .*`{theirs}`.* \| `{ours}`.* \| equal", PAGE, re.M)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = transformers.get_scheduler(
        theirs, optimizer, num_warmup_steps=10, num_training_steps=100, scheduler_specific_kwargs=given or None
    )
    curves = Curves(max_lr=1e-3, lr_warmup_steps=10, lr_decay_steps=100, lr_decay_style=ours, **settings)
    for step in range(100):
        assert curves.lr(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("ratio", [0.03, 0.1, 0.155])
def test_the_row_of_warmup_ratio_gives_equal_rates(ratio: float) -> None:
    here, why = FIELD["warmup_ratio"]
    assert here == "`--lr-warmup-iters`" and "ceil(ratio x steps)" in why
    theirs = transformers.TrainingArguments(output_dir="unused", warmup_steps=ratio, use_cpu=True).get_warmup_steps(105)
    assert theirs == math.ceil(ratio * 105)
    fraction = ScheduleConfig(lr=1.0, lr_warmup_fraction=ratio)
    built = build_schedule(fraction, OptimizerConfig(), global_batch_size=1, train_iters=105)
    assert built.curves.lr_warmup_steps != theirs, "the flag of the share is not rounded"

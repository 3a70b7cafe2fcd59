"""--deepspeed --deepspeed_config FILE beside flags and a YAML file; batch sizes on the ranks of a layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config import BatchPlan, RunConfig, check_world, describe
from megatron.errors import ConfigError
from megatron.optimizer.deepspeed_schedules import DeepSpeedCurve
from tests.helpers.other_programs import parse_args
from tests.unit.config.commands import SMALL, argv, without

SHAPE = without(SMALL, "--micro-batch-size", "--lr", "--train-iters")


def parse(tmp_path: Path, content: Any, *flags: str) -> RunConfig:
    file = tmp_path / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_args(argv(SHAPE, "--deepspeed --deepspeed_config", str(file), *flags))


def said(tmp_path: Path, config: RunConfig) -> list[str]:
    return [line.replace(str(tmp_path) + "/", "") for line in config.notices]


def refusal(tmp_path: Path, content: Any, *flags: str, ranks: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        check_world(parse(tmp_path, content, *flags), ranks)
    (line,) = caught.value.lines
    return line.replace(str(tmp_path) + "/", "")


BATCH = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}}


def test_the_file_fills_the_sections_and_origins_name_its_keys(tmp_path: Path) -> None:
    config = parse(tmp_path, {**BATCH, **ADAM, "bf16": {"enabled": True}}, "--train-iters 9")
    assert (config.training.global_batch_size, config.training.micro_batch_size) == (16, 4)
    assert config.schedule.lr == 0.25 and config.precision.bf16
    assert config.origins["lr"] == f"key optimizer.params.lr 0.25 of {tmp_path}/ds.json"
    row = next(line for line in describe(config).splitlines() if line.startswith("global_batch_size"))
    assert row.split() == ["global_batch_size", "16", *f"key train_batch_size 16 of {tmp_path}/ds.json".split()]


def test_a_flag_replaces_the_file_and_says_so(tmp_path: Path) -> None:
    config = parse(tmp_path, {**BATCH, **ADAM}, "--train-iters 9 --lr 0.5 --micro-batch-size 4")
    assert config.schedule.lr == 0.5
    assert said(tmp_path, config) == ["--lr 0.5: replaces optimizer.params.lr 0.25 of ds.json"]


def test_auto_is_what_the_flags_say(tmp_path: Path) -> None:
    content = {**BATCH, "train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    config = parse(tmp_path, {**content, "fp16": {"enabled": "auto"}}, "--train-iters 9 --lr 0.5 --fp16")
    assert config.schedule.lr == 0.5 and config.precision.fp16 and config.training.global_batch_size is None


def auto(path: str, content: dict[str, Any]) -> dict[str, Any]:
    """Sets one more key of the content to "auto"."""
    name, _, rest = path.partition(".")
    inner = auto(rest, content.get(name, {})) if rest else "auto"
    return {**content, name: inner}


FP16, ADAMW, WARMUP = (
    {"fp16": {"enabled": "auto"}},
    {"optimizer": {"type": "AdamW"}},
    {"scheduler": {"type": "WarmupLR"}},
)


@pytest.mark.parametrize(
    ("path", "beside", "always", "flag", "field", "of_flag", "otherwise"),
    [
        ("fp16.enabled", {}, "", "--fp16", "precision.fp16", True, False),
        ("bf16.enabled", {}, "", "--bf16", "precision.bf16", True, False),
        ("fp16.loss_scale", FP16, "--fp16", "--loss-scale 128", "precision.loss_scale", 128.0, None),
        (
            *("fp16.initial_scale_power", FP16, "--fp16"),
            *("--initial-loss-scale 4096", "precision.initial_loss_scale", 4096.0, 2.0**16),
        ),
        ("fp16.loss_scale_window", FP16, "--fp16", "--loss-scale-window 7", "precision.loss_scale_window", 7, 1000),
        ("fp16.hysteresis", FP16, "--fp16", "--hysteresis 3", "precision.hysteresis", 3, 2),
        (
            *("fp16.consecutive_hysteresis", FP16, "--fp16"),
            *("--consecutive-hysteresis", "precision.consecutive_hysteresis", True, False),
        ),
        ("fp16.min_loss_scale", FP16, "--fp16", "--min-loss-scale 4", "precision.min_loss_scale", 4.0, 1.0),
        ("gradient_clipping", {}, "", "--clip-grad 0.5", "optimizer.clip_grad", 0.5, 1.0),
        ("train_batch_size", {}, "", "--global-batch-size 8", "training.global_batch_size", 8, None),
        ("optimizer.params.betas", ADAMW, "", "--adam-beta2 0.5", "optimizer.adam_beta2", 0.5, 0.999),
        ("optimizer.params.eps", ADAMW, "", "--adam-eps 0.5", "optimizer.adam_eps", 0.5, 1e-8),
        ("optimizer.params.weight_decay", ADAMW, "", "--weight-decay 0.5", "optimizer.weight_decay", 0.5, 0.01),
        (
            *("optimizer.params.weight_decay", {"optimizer": {"type": "Adam"}}, ""),
            *("--weight-decay 0.5", "optimizer.weight_decay", 0.5, 0.0),
        ),
        (
            *("scheduler.params.warmup_num_steps", WARMUP, ""),
            *("--warmup-num-steps 5", "deepspeed_scheduler.warmup_num_steps", 5, 1000),
        ),
        (
            *("scheduler.params.warmup_min_lr", WARMUP, ""),
            *("--warmup-min-lr 0.25", "deepspeed_scheduler.warmup_min_lr", 0.25, 0.0),
        ),
        ("zero_optimization.stage", {}, "", "--zero-stage 2", "parallel.zero_stage", 2, None),
    ],
)
def test_auto_is_the_flag_or_what_deepspeed_has(
    tmp_path: Path, path: str, beside: dict[str, Any], always: str, flag: str, field: str, of_flag: Any, otherwise: Any
) -> None:
    content, flags = auto(path, beside), f"--train-iters 9 --lr 0.5 --micro-batch-size 4 {always}"
    section, name = field.split(".")
    for given, expected in ((flag, of_flag), ("", otherwise)):
        found = getattr(getattr(parse(tmp_path, content, flags, given), section), name)
        assert found == expected and type(found) is type(expected), (given, found)


def test_fp16_of_the_flag_alone_is_megatrons(tmp_path: Path) -> None:
    """A file that leaves fp16 to the flag still sets the rest of its block by DeepSpeed's defaults. Without such a
    block the scale begins at Megatron's value."""
    flags = "--train-iters 9 --lr 0.5 --micro-batch-size 4"
    assert parse(tmp_path, {}, flags, "--fp16").precision.initial_loss_scale == 2.0**32
    for left in ("auto", None):
        config = parse(tmp_path, {"fp16": {"enabled": left}}, flags, "--fp16")
        assert config.precision.initial_loss_scale == 2.0**16
        assert config.origins["initial_loss_scale"].startswith(
            "key fp16.enabled left to --fp16 without initial_scale_power of "
        )
        off = parse(tmp_path, {"fp16": {"enabled": left}}, flags)
        assert off.precision.initial_loss_scale == 2.0**32 and off.notices == ()
    other = tmp_path / "run.yaml"
    other.write_text("fp16: true\ninitial-loss-scale: 4096\n")
    for content in ({"fp16": {"enabled": True}}, {"fp16": {"enabled": "auto"}}):
        assert said(tmp_path, parse(tmp_path, content, flags, "--fp16 --loss-scale 128")) == []
        assert parse(tmp_path, content, flags, f"--config {other}").precision.initial_loss_scale == 4096


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_highest_rate_that_is_left_to_the_flags_is_lr(tmp_path: Path, kind: str) -> None:
    """transformers fills it in like this; a DecayLR without the key has DeepSpeed's 0.001."""
    lengths = {"warmup_num_steps": 2} | ({"total_num_steps": 9} if kind == "WarmupDecayLR" else {})
    content: dict[str, Any] = {"scheduler": {"type": kind, "params": lengths}}
    left = auto("scheduler.params.warmup_max_lr", content)
    in_file = {**left, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    flags = "--train-iters 9 --micro-batch-size 4"

    def highest(content: dict[str, Any], *given: str) -> float:
        config = parse(tmp_path, content, flags, *given)
        curve = DeepSpeedCurve(config.schedule.lr or 0.0, 4, config.deepspeed_scheduler)
        return max(curve.of_update(update) for update in range(10))

    assert highest(left, "--lr 0.5") == highest(in_file) == 0.5
    assert highest(left, "--lr 0.5", "--warmup-max-lr 0.25") == highest(in_file, "--warmup-max-lr 0.25") == 0.25
    assert highest(content, "--lr 0.5") == (0.5 if kind == "WarmupLR" else 0.001)
    said_of_lr = [line for line in parse(tmp_path, left, flags, "--lr 0.5").notices if "--lr 0.5" in line]
    assert said_of_lr == []


def test_blocks_that_no_flag_turns_on_ask_for_nothing_with_auto(tmp_path: Path) -> None:
    content = {"amp": {"enabled": "auto", "opt_level": "auto"}, "torch_autocast": {"enabled": None}}
    assert parse(tmp_path, content, "--train-iters 9 --lr 0.5 --micro-batch-size 4").notices == ()


def test_a_yaml_file_that_disagrees_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "run.yaml"
    other.write_text("lr: 0.5\ntrain-iters: 9\n")
    line = refusal(tmp_path, {**BATCH, **ADAM}, f"--config {other}")
    assert line == "optimizer.params.lr 0.25 of ds.json and --lr 0.5 of run.yaml disagree; keep one of them"
    other.write_text("lr: 0.25\ntrain-iters: 9\n")
    assert parse(tmp_path, {**BATCH, **ADAM}, f"--config {other}").schedule.lr == 0.25


def test_one_flag_without_the_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--deepspeed: has no effect without --deepspeed_config FILE; add that"):
        parse_args(argv(SMALL, "--deepspeed"))
    with pytest.raises(ConfigError, match=r"--deepspeed_config nowhere: has no effect without --deepspeed; add that"):
        parse_args(argv(SMALL, "--deepspeed_config nowhere"))
    assert parse_args(argv(SMALL, "--deepspeed=false")).notices == ()


def test_the_length_of_a_schedule_is_that_of_the_run_if_the_file_does_not_say(tmp_path: Path) -> None:
    content = {**BATCH, **ADAM, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3}}}
    config = parse(tmp_path, content, "--train-iters 9")
    assert config.deepspeed_scheduler.total_num_steps == 9
    assert (
        "ds.json: scheduler.type WarmupDecayLR: total_num_steps is missing (DeepSpeed requires it); --train-iters "
        "9 is used"
    ) in said(tmp_path, config)
    line = refusal(tmp_path, content, "--train-samples 99")
    assert line.startswith(
        "--lr-schedule WarmupDecayLR (scheduler.type WarmupDecayLR of ds.json): needs total_num_steps"
    )
    content["scheduler"]["params"]["total_num_steps"] = 7
    assert parse(tmp_path, content, "--train-iters 9").deepspeed_scheduler.total_num_steps == 7


def test_checks_name_the_key_and_the_file(tmp_path: Path) -> None:
    line = refusal(tmp_path, {**BATCH, **ADAM, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "--train-iters 9")
    assert "fp16.enabled true of ds.json" in line and "bf16.enabled true of ds.json" in line


def sizes(tmp_path: Path, content: dict[str, int], flags: str, ranks: int) -> tuple[int, int, int]:
    config = parse(tmp_path, {**ADAM, **content}, "--train-iters 9", flags)
    check_world(config, ranks)
    plan = BatchPlan.on(config, ranks)
    return plan.final_batch_size, plan.micro_batch_size, plan.micro_batches(plan.final_batch_size)


STEP, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("content", "flags", "ranks", "found"),
    [
        ({STEP: 16, MICRO: 4}, "", 1, (16, 4, 4)),  # the article on one rank
        ({STEP: 16, MICRO: 4}, "", 2, (16, 4, 2)),
        ({STEP: 16, ACCUMULATION: 2}, "", 2, (16, 4, 2)),
        ({MICRO: 4, ACCUMULATION: 2}, "", 2, (16, 4, 2)),
        ({STEP: 16, MICRO: 4, ACCUMULATION: 2}, "", 2, (16, 4, 2)),
        ({STEP: 16}, "", 2, (16, 8, 1)),
        ({MICRO: 4}, "", 2, (8, 4, 1)),
        ({STEP: 16}, "--micro-batch-size 2", 2, (16, 2, 4)),
        ({STEP: 16, MICRO: 4}, "--tensor-model-parallel-size 2", 4, (16, 4, 2)),  # two data-parallel ranks, not four
        ({MICRO: 4, ACCUMULATION: 2}, "--pipeline-model-parallel-size 2", 4, (16, 4, 2)),
    ],
)
def test_two_sizes_give_the_third(
    tmp_path: Path, content: dict[str, int], flags: str, ranks: int, found: tuple[int, int, int]
) -> None:
    assert sizes(tmp_path, content, flags, ranks) == found


@pytest.mark.parametrize(
    ("content", "ranks", "line"),
    [
        (
            {STEP: 16, MICRO: 4, ACCUMULATION: 2},
            4,
            "--global-batch-size 16 (train_batch_size 16 of ds.json) is not --micro-batch-size 4 "
            "(train_micro_batch_size_per_gpu 4 of ds.json) x --gradient-accumulation-steps 2 "
            "(gradient_accumulation_steps 2 of ds.json) x 4 data-parallel ranks = 32; make it 32, or remove one of the "
            "three settings",
        ),
        (
            {STEP: 16, MICRO: 4},
            8,
            "--global-batch-size 16 (train_batch_size 16 of ds.json) is not divisible by --micro-batch-size 4 "
            "(train_micro_batch_size_per_gpu 4 of ds.json) x 8 data-parallel ranks; use --global-batch-size 32 (a "
            "multiple of 32), or use --micro-batch-size 2",
        ),
        (
            {STEP: 16, ACCUMULATION: 3},
            2,
            "--global-batch-size 16 (train_batch_size 16 of ds.json) is not divisible by "
            "--gradient-accumulation-steps 3 "
            "(gradient_accumulation_steps 3 of ds.json) x 2 data-parallel ranks = 6; make it 12 or 18",
        ),
        (
            {STEP: 15},
            2,
            "--global-batch-size 15 (train_batch_size 15 of ds.json) is not divisible by 2 data-parallel ranks = 2; "
            "make it 14 or 16",
        ),
    ],
)
def test_sizes_that_contradict_are_refused_with_the_arithmetic(
    tmp_path: Path, content: dict[str, int], ranks: int, line: str
) -> None:
    assert refusal(tmp_path, {**ADAM, **content}, "--train-iters 9", ranks=ranks) == line


def test_accumulation_is_a_flag_too() -> None:
    config = parse_args(argv(SMALL, "--gradient-accumulation-steps 3"))
    check_world(config, 2)
    assert BatchPlan.on(config, 2).final_batch_size == 2 * 3 * 2
    with pytest.raises(ConfigError, match=r"--gradient-accumulation-steps 3 and --rampup-batch-size 2 2 8 exclude"):
        parse_args(
            argv(
                without(SMALL, "--train-iters"),
                "--train-samples 99 --gradient-accumulation-steps 3 --rampup-batch-size 2 2 8 --global-batch-size 8",
            )
        )


def test_what_follows_from_a_refused_key_is_not_told(tmp_path: Path) -> None:
    broken = {STEP: "16", MICRO: [4], "optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, broken, "--train-iters 9")
    assert [line.partition("ds.json: ")[2].split()[0] for line in caught.value.lines] == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "optimizer.params.lr",
    ]


@pytest.mark.parametrize(
    "block",
    [
        "AdamW",
        {"type": "Lamb", "params": {"lr": 1}},
        {"type": "AdamW", "params": {"lr": -1}},
        {"type": "SGD", "params": []},
    ],
)
def test_a_refused_optimizer_leaves_no_rate_to_ask_for(block: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ds.json: optimizer") as caught:
        parse(tmp_path, {MICRO: 4, "optimizer": block}, "--train-iters 9")
    assert "\n" not in str(caught.value)


ARTICLE = """
{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
 "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
 "zero_optimization": {"stage": 2,
   "offload_optimizer": {"device": "cpu", "pin_memory": true},
   "offload_param": {"device": "cpu", "pin_memory": true}},
 "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 32, "hysteresis": 2,
   "min_loss_scale": 1},
 "gradient_clipping": 1.0, "steps_per_print": 10}
"""


@pytest.mark.parametrize(
    ("stage", "flag", "told"),
    [(2, "", True), (3, "", False), (2, "--zero-stage 3", False), (3, "--zero-stage 2", True)],
)
@pytest.mark.parametrize("key", ["offload_param", "cpu_offload_param", "cpu_offload_params"])
def test_offloaded_parameters_need_stage_three_whoever_says_so(
    tmp_path: Path, key: str, stage: int, flag: str, told: bool
) -> None:
    block = {"stage": stage, key: {"device": "cpu"} if key == "offload_param" else True}
    config = parse(tmp_path, {**BATCH, **ADAM, "zero_optimization": block}, f"--train-iters 9 {flag}")
    assert any("has no effect without stage 3" in line for line in config.notices) == told
    assert config.parallel.parameters_on_host != told


def test_a_length_is_completed_for_the_schedule_that_is_used(tmp_path: Path) -> None:
    decays = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}}
    taken = "total_num_steps is missing"
    for flags, told in (("", True), ("--lr-schedule WarmupLR", False), ("--total-num-steps 7", False)):
        config = parse(tmp_path, {**BATCH, **ADAM, **decays}, f"--train-iters 9 {flags}")
        assert any(taken in line for line in config.notices) == told, flags
    assert config.deepspeed_scheduler.total_num_steps == 7


def test_a_block_that_a_flag_turns_on_is_used(tmp_path: Path) -> None:
    content = {**BATCH, **ADAM, "fp16": {"enabled": False, "hysteresis": 5}}
    assert any("no effect while fp16.enabled" in line for line in parse(tmp_path, content, "--train-iters 9").notices)
    config = parse(tmp_path, content, "--train-iters 9 --fp16")
    assert config.precision.hysteresis == 5 and not any("no effect" in line for line in config.notices)


def test_what_a_class_leaves_out_goes_with_the_class(tmp_path: Path) -> None:
    """DeepSpeed's Adam has no weight decay; --optimizer lion replaces that default as well."""
    content = {**BATCH, "optimizer": {"type": "Adam", "params": {"lr": 0.25}}}
    assert parse(tmp_path, content, "--train-iters 9").optimizer.weight_decay == 0.0
    assert parse(tmp_path, content, "--train-iters 9 --optimizer lion").optimizer.weight_decay == 0.01


def test_parameters_in_files_are_refused_where_they_would_be(tmp_path: Path) -> None:
    block = {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
    content = {**BATCH, **ADAM, "zero_optimization": block}
    assert not parse(tmp_path, content, "--train-iters 9").parallel.parameters_on_host
    with pytest.raises(ConfigError, match=r"offload_param\.device nvme of .*not in files; use cpu"):
        parse(tmp_path, content, "--train-iters 9 --zero-stage 3")


def test_the_file_of_the_zero_article_is_taken_and_its_mistakes_are_told(tmp_path: Path) -> None:
    config = parse(tmp_path, ARTICLE, "--train-iters 2000")
    lines = said(tmp_path, config)
    idle = "--remote-device cpu (zero_optimization.offload_param.device cpu of ds.json)"
    assert f"{idle}: has no effect without stage 3 of ZeRO (--zero-stage 3)" in lines
    assert any("total_num_steps is missing (DeepSpeed requires it); --train-iters 2000" in line for line in lines)
    assert config.parallel.zero == 2 and config.optimizer.optimizer_cpu_offload and config.logging.log_interval == 10
    assert config.precision.initial_loss_scale == 2.0**32 and config.deepspeed_scheduler.warmup_num_steps == 1000
    for ranks, accumulated in ((1, 4), (2, 2), (4, 1)):
        check_world(config, ranks)
        assert BatchPlan.on(config, ranks).micro_batches(16) == accumulated
    with pytest.raises(ConfigError, match=r"train_batch_size 16 of .*x 8 data-parallel ranks"):
        check_world(config, 8)

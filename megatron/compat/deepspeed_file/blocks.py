"""Keys of DeepSpeed's JSON that are read together: scheduler, loss scale, offload and reports."""

from collections.abc import Mapping
from typing import Any

from megatron.compat.deepspeed_file.optimizers import decide_optimizer
from megatron.compat.deepspeed_file.reading import FileReading
from megatron.errors import ConfigError


def decide_scheduler(reading: FileReading) -> None:
    if reading.given.get("scheduler.type") == "OneCycle" and "scheduler.params.cycle_momentum" not in reading.given:
        raise ConfigError(
            "scheduler.type OneCycle: DeepSpeed cycles the momentum by default, which is not supported; "
            'add "cycle_momentum": false to scheduler.params'
        )
    _rate_of_the_flag(reading)


def _rate_of_the_flag(reading: FileReading) -> None:
    """Uses --lr as WarmupDecayLR's highest rate if the file leaves that to the flags, as for WarmupLR. DeepSpeed's
    default of 0.001 is for a missing key."""
    key, rate = "scheduler.params.warmup_max_lr", reading.stronger.get("lr", reading.given.get("optimizer.params.lr"))
    kind = reading.stronger.get("lr_schedule", reading.given.get("scheduler.type"))
    if key in reading.left and kind == "WarmupDecayLR" and rate is not None and "warmup_max_lr" not in reading.stronger:
        reading.set("warmup_max_lr", rate, f"{key} left to --lr")


def decide_precision(reading: FileReading) -> None:
    """Starts the loss scale at DeepSpeed's default of 2^16 instead of --fp16's 2^32, also in a block that leaves
    `enabled` to --fp16."""
    given, stronger = reading.given, reading.stronger
    left = "fp16.enabled" in reading.left and bool(stronger.get("fp16"))
    static = given.get("fp16.loss_scale") or stronger.get("loss_scale")
    begins = "fp16.initial_scale_power" in given or "initial_loss_scale" in stronger
    if (left or given.get("fp16.enabled")) and not static and not begins:
        said = "left to --fp16" if left else "true"
        reading.set("initial_loss_scale", 2.0**16, f"fp16.enabled {said} without initial_scale_power")


def decide_offload(reading: FileReading) -> None:
    zero = "zero_optimization."
    for key in ("offload_optimizer.device", "cpu_offload"):
        if zero + key in reading.given:
            _offload_optimizer(reading, zero + key)
    path = zero + "offload_optimizer.nvme_path"
    if path in reading.given and reading.given.get(zero + "offload_optimizer.device") != "nvme":
        reading.say(f"{reading.spelled(path)}: no effect without device nvme")
    for key in ("offload_param.device", "cpu_offload_param", "cpu_offload_params"):
        if zero + key in reading.given:
            _offload_parameters(reading, zero + key)


def _device(reading: FileReading, key: str) -> str:
    """Returns cpu, nvme or none."""
    value = reading.given[key]
    if isinstance(value, bool):
        return "cpu" if value else "none"
    if value not in ("cpu", "nvme", "none"):
        raise ConfigError(f"{reading.spelled(key)}: no such device; use cpu, nvme or none")
    return str(value)


def _offload_optimizer(reading: FileReading, key: str) -> None:
    device, path = _device(reading, key), "zero_optimization.offload_optimizer.nvme_path"
    if device == "cpu":
        reading.set("optimizer_cpu_offload", True, reading.spelled(key))
    elif device == "nvme" and path not in reading.given:
        raise ConfigError(f"{reading.spelled(key)}: needs a directory; add nvme_path to offload_optimizer, or use cpu")
    elif device == "nvme":
        reading.set("optimizer_offload_directory", reading.given[path], reading.spelled(path))


def _offload_parameters(reading: FileReading, key: str) -> None:
    device = _device(reading, key)
    if device != "none":  # a later check reports that it has no effect below stage 3
        reading.set("remote_device", device, reading.spelled(key))


def decide_reports(reading: FileReading) -> None:
    given = reading.given
    if given.get("tensorboard.enabled"):
        job = given.get("tensorboard.job_name", "DeepSpeedJobName")
        folder = given.get("tensorboard.output_path", "").rstrip("/")
        *_, key = (name for name in ("enabled", "job_name", "output_path") if f"tensorboard.{name}" in given)
        reading.set("tensorboard_dir", f"{folder}/{job}" if folder else job, reading.spelled(f"tensorboard.{key}"))
    if given.get("wandb.enabled") and "wandb.project" not in given:
        reading.set("wandb_project", "deepspeed", reading.spelled("wandb.enabled"))


DECISIONS = (decide_optimizer, decide_scheduler, decide_precision, decide_offload, decide_reports)


def without_booleans(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces `"zero_optimization": true` of older files by the equivalent block."""
    value = content.get("zero_optimization")
    return {**content, "zero_optimization": {"stage": int(value)}} if isinstance(value, bool) else content

"""Hooks that write metrics: a JSON-lines file, TensorBoard and Weights & Biases. They run only on rank 0."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.config import LoggingConfig, RunConfig, to_dict
from megatron.errors import ConfigError, StorageError
from megatron.training.hooks import Hook
from megatron.training.metrics import EvalRecord, TrainRecord, form_of
from megatron.training.settings import wandb_missing
from megatron.utils.device import accelerator_memory
from megatron.utils.durable import fix_of
from megatron.utils.process import peak_resident_bytes


class MetricsFile(Hook):
    """Writes one JSON object per line, floats with all their digits. A resumed run appends."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"--metrics-jsonl {path}: cannot be written ({error.strerror}); name another file"
            ) from None

    def on_log(self, record: TrainRecord) -> None:
        self._write(record.as_json())

    def on_evaluate(self, record: EvalRecord) -> None:
        self._write(record.as_json())

    def on_end(self) -> None:
        self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        with writing_file_of("--metrics-jsonl", self._path):
            self._file.write(f"{json.dumps(values)}\n".encode())


@contextmanager
def writing_file_of(flag: str, path: object) -> Iterator[None]:
    """Turns an OSError (such as a full disk) into an error that names the flag and the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{flag} {path}: writing failed ({error.strerror}); {fix_of(error)}") from error


class TensorBoard(Hook):
    """Writes event files with Megatron's tags."""

    def __init__(self, config: LoggingConfig, *, world_size: int, device: torch.device) -> None:
        from torch.utils.tensorboard import SummaryWriter

        assert config.tensorboard_dir is not None
        self.config, self._world_size, self._device = config, world_size, device
        try:
            self._writer = SummaryWriter(log_dir=config.tensorboard_dir, max_queue=config.tensorboard_queue_size)
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {config.tensorboard_dir}: cannot be written ({error.strerror}); "
                "name another directory"
            ) from None

    def on_step(self, record: TrainRecord, times: Mapping[str, float]) -> None:
        config = self.config
        if record.iteration % config.tensorboard_log_interval:
            return
        step = record.iteration
        values: dict[str, float] = {}
        if config.log_learning_rate_to_tensorboard:
            values["learning-rate"] = record.learning_rate
        if config.log_batch_size_to_tensorboard:
            values["batch-size"] = record.global_batch_size
        values["lm loss"] = record.lm_loss
        if config.log_loss_scale_to_tensorboard:
            values["loss-scale"] = record.loss_scale
        if config.log_world_size_to_tensorboard:
            values["world-size"] = self._world_size
        values["grad-norm"] = record.grad_norm
        values |= {form_of(name).tag: value for name, value in record.reported.items()}
        for tag, value in values.items():
            self._scalar(tag, value, record)
        self._writer.add_scalar("iteration-time", record.seconds_per_iteration, step)
        self._writer.add_scalar("tokens-per-second", record.tokens_per_second, step)
        if config.log_timers_to_tensorboard:
            for name, seconds in times.items():
                self._writer.add_scalar(f"{name}-time", seconds, step)
        if config.log_memory_to_tensorboard:
            for name, count in self._memory().items():
                self._writer.add_scalar(name, count, step)

    def on_log(self, record: TrainRecord) -> None:
        self._writer.flush()

    def on_evaluate(self, record: EvalRecord) -> None:
        name = "validation" if record.split == "valid" else record.split
        self._scalar(f"lm loss {name}", record.lm_loss, record)
        if self.config.log_validation_ppl_to_tensorboard:
            self._scalar(f"lm loss {name} ppl", record.perplexity, record)
        if record.bits_per_byte is not None:
            self._scalar(f"bits per byte {name}", record.bits_per_byte, record)
        self._writer.flush()

    def on_end(self) -> None:
        self._writer.close()

    def _scalar(self, tag: str, value: float, record: TrainRecord | EvalRecord) -> None:
        self._writer.add_scalar(tag, value, record.iteration)
        self._writer.add_scalar(f"{tag} vs samples", value, record.consumed_train_samples)

    def _memory(self) -> dict[str, int]:
        sizes = accelerator_memory(self._device)
        if not sizes:
            return {"mem-peak-resident-bytes": peak_resident_bytes()}
        return {"mem-reserved-bytes": sizes["reserved"], "mem-allocated-bytes": sizes["allocated"]}


class WeightsAndBiases(Hook):
    """Writes metrics to Weights & Biases, for --wandb-project. Requires the `wandb` package, which is not a
    dependency."""

    def __init__(self, config: LoggingConfig, whole_config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise wandb_missing(str(config.wandb_project)) from None
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=config.wandb_save_dir,
            config=whole_config,
        )

    def on_log(self, record: TrainRecord) -> None:
        values = {k: v for k, v in record.as_json().items() if isinstance(v, int | float)}
        self._run.log({"lm loss": record.lm_loss, **values}, step=record.iteration)

    def on_evaluate(self, record: EvalRecord) -> None:
        name = "validation" if record.split == "valid" else record.split
        values = {f"lm loss {name}": record.lm_loss, f"lm loss {name} ppl": record.perplexity}
        if record.bits_per_byte is not None:
            values[f"bits per byte {name}"] = record.bits_per_byte
        self._run.log(values, step=record.iteration)

    def on_end(self) -> None:
        self._run.finish()


def build_metric_writers(config: RunConfig, *, world_size: int, device: torch.device) -> list[Hook]:
    """Builds the metric writers that the flags enable."""
    logging = config.logging
    writers: list[Hook] = []
    if logging.metrics_jsonl:
        writers.append(MetricsFile(logging.metrics_jsonl))
    if logging.tensorboard_dir:
        writers.append(TensorBoard(logging, world_size=world_size, device=device))
    if logging.wandb_project:
        writers.append(WeightsAndBiases(logging, to_dict(config)))
    return writers

"""Formats log lines in the two forms of --log-format: Megatron-LM's, for parsers, and a compact one, for people."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from megatron.training.metrics import EvalRecord, TrainRecord, form_of
from megatron.utils.timers import human_duration


@dataclass(frozen=True)
class LogForm:
    train: Callable[[TrainRecord, datetime], str]
    evaluation: Callable[[EvalRecord, str], str]  # str: the iteration and the split
    stamped: bool
    """True if every line begins with the time. Parsers of Megatron-LM's log do not expect that."""


def classic_train(record: TrainRecord, now: datetime) -> str:
    """Formats Megatron-LM's fields in its wording and order, then this package's own fields."""
    parts = [
        f" iteration {record.iteration:8d}/{record.total_iterations:8d}",
        f"consumed samples: {record.consumed_train_samples:12d}",
        f"elapsed time per iteration (ms): {record.seconds_per_iteration * 1000:.1f}",
        f"learning rate: {record.learning_rate:.3E}",
        f"global batch size: {record.global_batch_size:5d}",
        f"lm loss: {record.mean_lm_loss:.6E}",
        f"loss scale: {record.loss_scale:.1f}",
        f"grad norm: {record.grad_norm:.3f}",
    ]
    forms = [(form_of(name), value) for name, value in record.reported.items()]
    parts += [f"{form.label}: {value:{form.classic}}" for form, value in forms]
    parts += [
        f"number of skipped iterations: {record.skipped_iterations:3d}",
        f"number of nan iterations: {record.nan_iterations:3d}",
        f"tokens/s: {record.tokens_per_second:.0f}",
        f"samples/s: {record.samples_per_second:.2f}",
        f"waited for data (ms): {record.data_wait_seconds * 1000:.1f}",
    ]
    if record.tflops_per_device is not None:
        parts.append(f"TFLOP/s/device: {record.tflops_per_device:.3f}")
    if record.model_flops_utilisation is not None:
        parts.append(f"MFU: {100 * record.model_flops_utilisation:.1f}%")
    parts += [f"ETA: {human_duration(record.eta_seconds)}", f"datetime: {now:%Y-%m-%d %H:%M:%S}"]
    return " | ".join(parts) + " |"


def compact_train(record: TrainRecord, now: datetime) -> str:
    """Formats a step in one terminal line, without values that are normal (a loss scale of 1, no skipped steps)."""
    width = len(str(record.total_iterations))
    parts = [
        f"iteration {record.iteration:{width}d}/{record.total_iterations}",
        f"lm loss {record.mean_lm_loss:.6f}",
        f"grad norm {record.grad_norm:.3f}",
        f"lr {record.learning_rate:.3e}",
    ]
    if record.loss_scale != 1:
        parts.append(f"loss scale {record.loss_scale:g}")
    forms = [(form_of(name), value) for name, value in record.reported.items()]
    parts += [f"{form.label} {value:{form.compact}}" for form, value in forms]
    if record.skipped_iterations:
        parts.append(f"{record.skipped_iterations} skipped")
    if record.nan_iterations:
        parts.append(f"{record.nan_iterations} not finite")
    parts += [f"{record.seconds_per_iteration * 1000:.1f} ms", f"{record.tokens_per_second:.0f} tokens/s"]
    if record.model_flops_utilisation is not None:
        parts.append(f"MFU {100 * record.model_flops_utilisation:.1f}%")
    return " | ".join([*parts, f"ETA {human_duration(record.eta_seconds)}"])


def classic_evaluation(record: EvalRecord, where: str) -> str:
    line = (
        f" validation loss at {where} | lm loss value: {record.lm_loss:.6E} | lm loss PPL: {record.perplexity:.6E} | "
    )
    if record.bits_per_byte is not None:
        line += f"bits per byte: {record.bits_per_byte:.6f} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def compact_evaluation(record: EvalRecord, where: str) -> str:
    line = f"{where} | lm loss {record.lm_loss:.6f} | perplexity {record.perplexity:.6g}"
    return line if record.bits_per_byte is None else f"{line} | bits per byte {record.bits_per_byte:.6f}"


LOG_FORMS = {
    "classic": LogForm(classic_train, classic_evaluation, stamped=False),
    "compact": LogForm(compact_train, compact_evaluation, stamped=True),
}

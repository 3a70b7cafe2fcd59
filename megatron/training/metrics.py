"""Records of each step and of each evaluation, and throughput."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PPL_CAP = 20.0  # exp() of a larger loss is meaningless; Megatron has the same cap


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """One iteration, as logged. `lm_loss` is its loss; `mean_lm_loss` is the mean loss since the last log line."""

    iteration: int
    total_iterations: int
    consumed_train_samples: int
    learning_rate: float
    weight_decay: float
    global_batch_size: int
    lm_loss: float
    mean_lm_loss: float
    loss_scale: float
    grad_norm: float
    skipped_iterations: int
    nan_iterations: int
    seconds_per_iteration: float
    data_wait_seconds: float  # part of seconds_per_iteration spent waiting for data: about 0 with enough --num-workers
    tokens_per_second: float
    samples_per_second: float
    tflops_per_device: float | None
    model_flops_utilisation: float | None
    eta_seconds: float
    reported: Mapping[str, float] = field(default_factory=dict)
    """Numbers passed to `Engine.report`, by name."""

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        reported = values.pop("reported")
        return {"split": "train", **{name: value for name, value in (values | reported).items() if value is not None}}


@dataclass(frozen=True)
class NumberForm:
    """Label and formats of a reported number."""

    label: str
    """Label in the log."""
    classic: str
    """Format spec in Megatron-LM's log lines."""
    compact: str
    """Format spec in compact log lines."""
    tag: str
    """TensorBoard tag."""


NUMBERS = {
    "num_zeros": NumberForm("num zeros", ".1f", ".0f", "num-zeros"),
    "params_norm": NumberForm("params norm", ".3f", ".3f", "params-norm"),
}
"""Forms of reported numbers, by name."""


def form_of(name: str) -> NumberForm:
    """Returns the form of a reported number; one that is not in `NUMBERS` is written under its name."""
    return NUMBERS.get(name) or NumberForm(name, ".6E", ".4g", name)


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation of the validation or the test split."""

    split: str  # "valid", "validation-NAME" for one of several sets, or "test"
    iteration: int
    consumed_train_samples: int
    lm_loss: float
    counted_tokens: int
    counted_bytes: int | None = None  # bytes of their text; None if token ids do not represent text

    @property
    def bits_per_byte(self) -> float | None:
        """Total loss of the counted tokens in bits, divided by their bytes; None without bytes."""
        if not self.counted_bytes:
            return None
        return self.lm_loss * self.counted_tokens / math.log(2) / self.counted_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(min(PPL_CAP, self.lm_loss))

    def as_json(self) -> dict[str, Any]:
        found = {**asdict(self), "lm_loss_ppl": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Speeds:
    tokens_per_second: float
    samples_per_second: float
    tflops_per_device: float | None
    utilisation: float | None


@dataclass(frozen=True, kw_only=True)
class Throughput:
    seq_length: int
    world_size: int
    flops_per_token: float | None  # None for a model other than the package's GPT
    peak_flops: float | None  # peak of one device; None if unknown, and then no MFU is reported

    def rates(self, samples: int, seconds: float) -> Speeds:
        tokens_per_second = samples * self.seq_length / seconds
        per_device = None
        if self.flops_per_token is not None:
            per_device = tokens_per_second * self.flops_per_token / self.world_size
        utilisation = per_device / self.peak_flops if per_device is not None and self.peak_flops else None
        return Speeds(
            tokens_per_second, samples / seconds, None if per_device is None else per_device / 1e12, utilisation
        )

"""What the engine of a model that is not ours is told, in our terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron.config.sections.precision import PrecisionConfig
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    micro: int
    accumulation: int
    ranks: int

    @property
    def whole(self) -> int:
        return self.micro * self.accumulation * self.ranks

    @staticmethod
    def fit(whole: int | None, micro: int | None, accumulation: int | None, ranks: int) -> "BatchSizes":
        """As DeepSpeed: two of the three are given, or the batch or the micro-batch alone without accumulation."""
        if whole is None and micro is None:
            raise ConfigError(
                "train_batch_size: not given, nor train_micro_batch_size_per_gpu; give one of them at least"
            )
        if micro is None:
            assert whole is not None
            accumulation = 1 if accumulation is None else accumulation
            micro = whole // (accumulation * ranks)
        elif accumulation is None:
            accumulation = 1 if whole is None else whole // (micro * ranks)
        found = BatchSizes(micro=micro, accumulation=accumulation, ranks=ranks)
        if micro < 1 or accumulation < 1 or (whole is not None and found.whole != whole):
            raise ConfigError(
                f"train_batch_size {whole}: is not train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {accumulation} x {ranks} ranks = {found.whole}; change one of them, or "
                "the number of ranks"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    batch: BatchSizes
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero_stage: int = 0
    clip_grad: float = 0.0
    offloads: bool = False
    """Whether masters and moments are in host memory, and updated there."""
    parameters_on_host: bool = False
    """Whether an accelerator's ranks keep their shares of the parameters in host memory (stage 3)."""
    overlap: bool = True
    """Whether gradients are reduced during the last backward pass."""
    log_interval: int | None = None
    """Updates between two lines of the log; None is silence."""
    given: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The configuration's keys, such as fp16.enabled, with their values."""
    momentum: float | tuple[float, float] = 0.0
    """The momentum, or the betas, of the optimizer that the configuration names."""

"""Settings of the engine for any model."""

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
        """Computes the missing sizes as DeepSpeed does, from two of the three, or from `whole` or `micro` alone."""
        if whole is None and micro is None:
            raise ConfigError(
                "train_batch_size: missing, and so is train_micro_batch_size_per_gpu; give at least one of them"
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
    """True if masters and moments are kept and updated in host memory."""
    parameters_on_host: bool = False
    """True if an accelerator's ranks keep their shards of the parameters in host memory (stage 3)."""
    overlap: bool = True
    """True if gradients are reduced during the last backward pass."""
    log_interval: int | None = None
    """Number of updates between two log lines; None: no log lines."""
    given: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The configuration's keys, such as fp16.enabled, with their values."""
    momentum: float | tuple[float, float] = 0.0
    """The momentum, or the betas, of the optimizer that the configuration names."""

"""Loss scale: a factor on the loss that keeps fp16 gradients from underflowing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.precision import PrecisionConfig
from megatron.optimizer.norms import widest

ScalerState = dict[str, float | int]


@dataclass
class ConstantLossScaler:
    """Constant factor on the loss; 1 means no scaling."""

    scale: float = 1.0

    def update(self, overflow: bool) -> None:
        del overflow

    def state(self) -> ScalerState:
        return {}

    def load_state(self, state: ScalerState) -> None:
        """Does nothing: a constant scale is a setting of this run."""


@dataclass
class DynamicLossScaler:
    """Doubles the scale after `window` good steps in a row, and halves it on overflow once `hysteresis` is used up.

    As in Megatron, only a doubling refills the hysteresis: after the first halving every further overflow halves again.
    With `consecutive_hysteresis` every good step refills it, as with DeepSpeed's setting of that name. `growth_tracker`
    counts good steps in a row; `hysteresis_tracker` counts down the overflows until a halving.
    """

    scale: float = 2.0**32
    min_scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    growth_tracker: int = 0
    hysteresis_tracker: int = -1

    def __post_init__(self) -> None:
        if self.hysteresis_tracker < 0:
            self.hysteresis_tracker = self.hysteresis

    def update(self, overflow: bool) -> None:
        """Updates the scale. Call it once after every step, skipped ones included."""
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker = max(self.hysteresis_tracker - 1, 0)
            if self.hysteresis_tracker == 0:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        if self.consecutive_hysteresis:
            self.hysteresis_tracker = self.hysteresis
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale *= 2

    def state(self) -> ScalerState:
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state(self, state: ScalerState) -> None:
        if not state:  # saved under a constant scale: the dynamic scale keeps its initial value
            return
        self.scale = float(state["scale"])
        self.growth_tracker = int(state["growth_tracker"])
        self.hysteresis_tracker = int(state["hysteresis_tracker"])


LossScaler = ConstantLossScaler | DynamicLossScaler


class ScaleOnDevice:
    """Copy of a scaler's state on the device. It is current even while the host has not yet read the outcome of the
    step in flight."""

    def __init__(self, scaler: DynamicLossScaler, device: torch.device) -> None:
        self._scaler = scaler
        self.scale = torch.zeros((), dtype=widest(device), device=device)
        self._growth, self._hysteresis = torch.zeros_like(self.scale), torch.zeros_like(self.scale)
        self.follow()

    def follow(self) -> None:
        """Copies the host scaler's state, after a checkpoint was loaded."""
        self.scale.fill_(self._scaler.scale)
        self._growth.fill_(self._scaler.growth_tracker)
        self._hysteresis.fill_(self._scaler.hysteresis_tracker)

    def update(self, overflow: Tensor) -> None:
        """Does what `DynamicLossScaler.update` does, without control flow: computes both outcomes and selects one."""
        scaler, zero = self._scaler, torch.zeros_like(self.scale)
        left = (self._hysteresis - 1).clamp(min=0)
        lowered = torch.where(left == 0, (self.scale / 2).clamp(min=scaler.min_scale), self.scale)
        grown = self._growth + 1 == scaler.window
        raised = torch.where(grown, self.scale * 2, self.scale)
        full = torch.full_like(zero, scaler.hysteresis)
        refilled = full if scaler.consecutive_hysteresis else torch.where(grown, full, self._hysteresis)
        counted = torch.where(grown, zero, self._growth + 1)
        self.scale.copy_(torch.where(overflow, lowered, raised))
        self._hysteresis.copy_(torch.where(overflow, left, refilled))
        self._growth.copy_(torch.where(overflow, zero, counted))


def build_loss_scaler(precision: PrecisionConfig) -> LossScaler:
    """Builds a constant scaler from --loss-scale, a dynamic one for --fp16, otherwise one with the constant scale 1."""
    if precision.loss_scale is not None:
        return ConstantLossScaler(precision.loss_scale)
    if not precision.fp16:
        return ConstantLossScaler()
    return DynamicLossScaler(
        scale=precision.initial_loss_scale,
        min_scale=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        consecutive_hysteresis=precision.consecutive_hysteresis,
    )

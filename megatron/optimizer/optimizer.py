"""One optimizer step: unscale, check for non-finite numbers, clip, update in full precision, copy back.

    (loss * optimizer.loss_scale).backward(); grads.reduce()
    info = optimizer.step(lr, weight_decay)

Half-precision parameters have fp32 masters, which the update works on; parameters in fp32 or fp64 are their own.

`asynchronous`: no number of a step is read while it runs. `start_step` hands the work over and returns what the step
did as a tensor; `settle` is given its values when they have reached the host. The next step's backward may already be
in flight then, so the loss scale is also kept on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import GradBuffers
from megatron.distributed.shard import ShardSpec
from megatron.errors import CheckpointError, ConfigError
from megatron.ops import Kernels
from megatron.optimizer.decision import decide
from megatron.optimizer.flat import FlatAdam
from megatron.optimizer.loss_scaler import DynamicLossScaler, LossScaler, ScaleOnDevice, build_loss_scaler
from megatron.optimizer.norms import SplitOver, SquareSum, global_norm, global_zeros, square_sum_for
from megatron.optimizer.update_rules import GroupRule, OptimizerState, TorchUpdate, build_rule

ExtraState = dict[str, Any]
"""step, skipped_in_a_row, loss_scaler: plain numbers."""

REPORT_SIZE = 3
"""Length of the tensor that `start_step` returns."""


def megatron_rule(name: str, parameter: nn.Parameter) -> GroupRule:
    """Biases and one-dimensional parameters have no weight decay."""
    return GroupRule(wd_mult=0.0 if name.endswith(".bias") or parameter.dim() <= 1 else 1.0)


@dataclass(frozen=True)
class StepInfo:
    """What a step did."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping, without the loss scale."""
    skipped: bool
    """No parameter was touched, because the gradient is not finite."""
    loss_scale: float
    """The scale that this step's loss had."""
    clipped: bool = False
    skipped_in_a_row: int = 0


class Optimizer:
    """Masters, moments and the loss scale of the parameters in `grads`."""

    def __init__(
        self,
        grads: GradBuffers,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        *,
        rule: Callable[[str, nn.Parameter], GroupRule] = megatron_rule,
        split_over: Mapping[str, SplitOver] | None = None,
        norm_axes: Sequence[SplitOver] = (),
        specs: Mapping[str, ShardSpec] | None = None,
        kernels: Kernels | None = None,
        asynchronous: bool = False,
    ) -> None:
        """`rule` groups the parameters. `split_over`: the axes that a parameter is split over, () if it is not named.
        `norm_axes`: all values of `split_over` on any rank, since all ranks must sum over the same axes. `specs` say
        which elements another rank holds as well. `kernels`: whether AdamW and the norm are native or torch's own."""
        self.grads = grads
        self.scaler: LossScaler = build_loss_scaler(precision)
        self.skipped_in_a_row = 0
        self.asynchronous = asynchronous
        self._clip_grad = config.clip_grad
        self._norm_axes = tuple(norm_axes)
        self._split_over, self._specs = dict(split_over or {}), dict(specs or {})
        self._device = next((grads.parameter(name).device for name in grads.names), torch.device("cpu"))
        rules = {name: rule(name, grads.parameter(name)) for name in grads.names}
        self._update = build_update(grads, config, rules, kernels, self._device, asynchronous)
        self._square_sum: SquareSum = square_sum_for(kernels, asynchronous)
        self._scale_on_device: ScaleOnDevice | None = None
        if asynchronous and isinstance(self.scaler, DynamicLossScaler):
            self._scale_on_device = ScaleOnDevice(self.scaler, self._device)
        self._steps = 0

    @property
    def loss_scale(self) -> float:
        """The factor on the loss, after the steps that have been settled."""
        return self.scaler.scale

    @property
    def next_loss_scale(self) -> float | Tensor:
        """The factor on the next loss. With a step in flight the device alone knows it."""
        return self.scaler.scale if self._scale_on_device is None else self._scale_on_device.scale.clone()

    @property
    def static_scale(self) -> bool:
        """Whether a non-finite gradient is an error, and not how a dynamic loss scale finds its value."""
        return not isinstance(self.scaler, DynamicLossScaler)

    def step(self, lr: float, weight_decay: float, grad_scale: float | None = None) -> StepInfo:
        """Updates the parameters from the reduced gradients, unless one of these is not finite.

        `grad_scale`: the gradients in the buffers are the true ones times this. Unset: the loss scale; with it, also
        what else the loss was divided by too little.
        """
        return self.settle(self.start_step(lr, weight_decay, grad_scale).tolist())

    @torch.no_grad()
    def start_step(
        self,
        lr: float,
        weight_decay: float,
        grad_scale: float | Tensor | None = None,
        finite: Tensor | None = None,
    ) -> Tensor:
        """`step`, whose outcome stays on the device. `finite`: a further condition for the update."""
        grads = list(self.grads.grads())
        copies = self._by_axes(grads, counted=False)
        norm = global_norm(self._by_axes(grads), copies, square_sum=self._square_sum)
        decision = decide(norm, self.next_loss_scale if grad_scale is None else grad_scale, self._clip_grad, finite)
        self._update.step(decision, lr, weight_decay)
        if self._scale_on_device is not None:
            self._scale_on_device.update(decision.applied == 0)
        return decision.report()

    def settle(self, report: Sequence[float]) -> StepInfo:
        """Updates the host's counters and loss scale with the report of the oldest step that has not been settled."""
        norm, applied, clipped = report
        scale, skipped = self.scaler.scale, not applied
        self.scaler.update(overflow=skipped)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self._steps += not skipped
        return StepInfo(norm, skipped, scale, bool(clipped), self.skipped_in_a_row)

    def find_nonfinite(self, limit: int = 5) -> list[str]:
        """The first parameters whose gradient on this rank is not finite, in the model's order."""
        found: list[str] = []
        for name, grad in self.grads.grads():
            if len(found) < limit and not torch.isfinite(grad).all():
                found.append(name)
        return found

    def count_zeros(self) -> Tensor:
        """Elements of the reduced gradients that are exactly zero, over the whole model."""
        return global_zeros(self._by_axes(list(self.grads.grads())))

    @torch.no_grad()
    def params_norm(self) -> float:
        """Global L2 norm of the parameters (the masters where there are some)."""
        state = self.state()
        weights = [(name, state[name].get("master", self.grads.parameter(name))) for name in state]
        return global_norm(self._by_axes(weights), square_sum=self._square_sum).item()

    def state(self) -> OptimizerState:
        """Per parameter name: its moments, and `master` for half-precision parameters."""
        return self._update.state()

    def extra_state(self) -> ExtraState:
        """The rest of the state: plain numbers, the same on every rank."""
        return {"step": self._steps, "skipped_in_a_row": self.skipped_in_a_row, "loss_scaler": self.scaler.state()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[str, torch.Tensor]], extra: Mapping[str, Any]) -> None:
        """Restores `state()` and `extra_state()`; half-precision parameters are rounded from their masters."""
        own = self.state()
        _check_same("optimizer's parameters", set(own), set(state))
        _check_same("optimizer's counters", set(self.extra_state()), set(extra))
        for name, tensors in own.items():
            _check_same(f"optimizer state of {name}", set(tensors), set(state[name]))
            for key, tensor in tensors.items():
                _check_tensor(f"{key} of {name}", tensor, state[name][key])
        self._steps = int(extra["step"])
        self._update.load(state, self._steps)
        self.skipped_in_a_row = int(extra["skipped_in_a_row"])
        self.scaler.load_state(extra["loss_scaler"])
        if self._scale_on_device is not None:
            self._scale_on_device.follow()

    def refresh_masters(self) -> None:
        """After weights were loaded without the optimizer's state."""
        self._update.refresh_masters()

    def _by_axes(
        self, tensors: list[tuple[str, torch.Tensor]], counted: bool = True
    ) -> dict[SplitOver, list[torch.Tensor]]:
        """By the axes they are split over: the elements that this rank counts, or those that another rank counts."""
        groups: dict[SplitOver, list[torch.Tensor]] = {axes: [] for axes in self._norm_axes}
        for name, tensor in tensors:
            spec = self._specs.get(name)
            if spec is None:
                parts = [tensor] if counted else []
            else:
                parts = spec.counted(tensor) if counted else spec.copied(tensor)
            groups.setdefault(self._split_over.get(name, ()), []).extend(parts)
        return groups


def build_update(
    grads: GradBuffers,
    config: OptimizerConfig,
    rules: Mapping[str, GroupRule],
    kernels: Kernels | None,
    device: torch.device,
    asynchronous: bool,
) -> FlatAdam | TorchUpdate:
    """AdamW on flat buffers if there is a kernel and all gradients are in buffers; else torch's, tensor by tensor."""
    kernel = kernels.adamw if kernels is not None else None
    dtypes = {grads.grad_dtype(name) for name in grads.names}
    if config.optimizer == "adam" and kernel is not None and grads.flat and dtypes <= {torch.float32}:
        betas = config.adam_beta1, config.adam_beta2
        return FlatAdam(grads, rules, betas, config.adam_eps, kernel, remainders=config.store_param_remainders)
    if config.store_param_remainders:
        raise no_place_for_remainders()
    return TorchUpdate(grads, rules, build_rule(config, device), asynchronous=asynchronous)


def no_place_for_remainders() -> ConfigError:
    return ConfigError(
        "--store-param-remainders: only the native AdamW can work without fp32 masters, and it does not run here; "
        "leave it out, or see the row adamw of the table of kernels"
    )


def _check_same(what: str, here: set[str], saved: set[str]) -> None:
    if here == saved:
        return
    missing, unknown = sorted(here - saved), sorted(saved - here)
    parts = [f"missing: {', '.join(missing[:5])}"] if missing else []
    parts += [f"not in this model: {', '.join(unknown[:5])}"] if unknown else []
    raise CheckpointError(
        f"the checkpoint's {what} do not fit ({'; '.join(parts)}); give --no-load-optim to start the optimizer anew"
    )


def _check_tensor(what: str, here: torch.Tensor, saved: torch.Tensor) -> None:
    if here.shape != saved.shape or here.dtype != saved.dtype:
        raise CheckpointError(
            f"{what} is {saved.dtype} {tuple(saved.shape)} in the checkpoint and {here.dtype} {tuple(here.shape)} "
            "here; give --no-load-optim to start the optimizer anew"
        )

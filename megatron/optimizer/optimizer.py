"""One optimizer step: unscale, look for bad numbers, clip, update in full precision, copy back.

    (loss * optimizer.loss_scale).backward(); grads.reduce()
    info = optimizer.step(lr, weight_decay)

Half-precision parameters have fp32 masters, which the update works on; parameters in fp32 or fp64 are their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import GradBuffers
from megatron.distributed.shard import ShardSpec
from megatron.errors import CheckpointError
from megatron.optimizer.inner import Slot, build_rule
from megatron.optimizer.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler
from megatron.optimizer.norms import SplitOver, global_norm, global_zeros

ExtraState = dict[str, Any]
"""step, skipped_in_a_row, loss_scaler: plain numbers."""

_CLIP_EPSILON = 1e-6  # as in torch and Megatron: the clipped norm is a hair below the limit


@dataclass(frozen=True)
class GroupRule:
    """How a parameter's rates relate to those of the schedule."""

    wd_mult: float = 1.0
    lr_mult: float = 1.0


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
        scaler: LossScaler | None = None,
        *,
        rule: Callable[[str, nn.Parameter], GroupRule] = megatron_rule,
        split_over: Mapping[str, SplitOver] | None = None,
        norm_axes: Sequence[SplitOver] = (),
        specs: Mapping[str, ShardSpec] | None = None,
    ) -> None:
        """`split_over`: for parameters of which this rank holds a part, the axes to add norms over, and `norm_axes`
        all that occur on any rank, since all ranks must add over the same; `specs` say what of a part another rank
        holds too."""
        self.grads = grads
        self.scaler: LossScaler = scaler or ConstantLossScaler()
        self.skipped_in_a_row = 0
        self._clip_grad = config.clip_grad
        self._norm_axes = tuple(norm_axes)
        self._split_over, self._specs = dict(split_over or {}), dict(specs or {})
        masters = {name: _master(grads.parameter(name)) for name in grads.names}
        self._halves = [name for name, master in masters.items() if master is not grads.parameter(name)]
        for name, master in masters.items():
            dtype = grads.grad_dtype(name)
            assert dtype == master.dtype, f"the gradient of {name} is {dtype}, its master {master.dtype}"
        device = next((master.device for master in masters.values()), torch.device("cpu"))
        self._update_rule = build_rule(config, device)
        self._slots: dict[str, Slot] = {name: self._update_rule.slot(master) for name, master in masters.items()}
        self._groups: dict[GroupRule, list[str]] = {}
        for name in masters:
            self._groups.setdefault(rule(name, grads.parameter(name)), []).append(name)
        self._steps = 0

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.scaler.scale

    @property
    def static_scale(self) -> bool:
        """Whether a gradient that is not finite is an error, not a loss scale on its way down."""
        return not isinstance(self.scaler, DynamicLossScaler)

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, grad_scale: float | None = None) -> StepInfo:
        """Updates the parameters from the reduced gradients, unless one of these is not finite.

        `grad_scale`: the gradients in the buffers are the true ones times this. Unset: the loss scale; with it, also
        what else the loss was divided by too little. Afterwards the buffers hold the gradients that were applied.
        """
        scale = self.scaler.scale
        multiplier = 1.0 / (scale if grad_scale is None else grad_scale)
        grads = list(self.grads.grads())
        norm = global_norm(self._by_axes(grads), self._by_axes(grads, counted=False)) * abs(multiplier)
        if not math.isfinite(norm):
            self.skipped_in_a_row += 1
            self.scaler.update(overflow=True)
            return StepInfo(norm, True, scale, skipped_in_a_row=self.skipped_in_a_row)
        clipped = 0.0 < self._clip_grad < norm + _CLIP_EPSILON
        if clipped:
            multiplier *= self._clip_grad / (norm + _CLIP_EPSILON)
        if multiplier != 1.0:
            self.grads.multiply(multiplier)
        self._update(lr, weight_decay)
        self.skipped_in_a_row = 0
        self.scaler.update(overflow=False)
        return StepInfo(norm, False, scale, clipped)

    def find_nonfinite(self, limit: int = 5) -> list[str]:
        """The first parameters whose gradient on this rank is not finite, in the model's order."""
        found: list[str] = []
        for name, grad in self.grads.grads():
            if len(found) < limit and not torch.isfinite(grad).all():
                found.append(name)
        return found

    def count_zeros(self) -> int:
        """Elements of the reduced gradients that are exactly zero, over the whole model."""
        return global_zeros(self._by_axes(list(self.grads.grads())))

    def params_norm(self) -> float:
        """Global L2 norm of the parameters (the masters where there are some)."""
        return global_norm(self._by_axes([(name, slot.tensor) for name, slot in self._slots.items()]))

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Per parameter name: its moments, and `master` for half-precision parameters. The live tensors, no copies."""
        states = {name: dict(slot.state) for name, slot in self._slots.items()}
        for name in self._halves:
            states[name]["master"] = self._slots[name].tensor
        return states

    def extra_state(self) -> ExtraState:
        """The rest of the state: plain numbers, the same on every rank."""
        return {"step": self._steps, "skipped_in_a_row": self.skipped_in_a_row, "loss_scaler": self.scaler.state()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[str, torch.Tensor]], extra: Mapping[str, Any]) -> None:
        """Goes on from `state()` and `extra_state()` of another run; the parameters follow their masters."""
        own = self.state()
        _check_same("optimizer's parameters", set(own), set(state))
        _check_same("optimizer's counters", set(self.extra_state()), set(extra))
        for name, tensors in own.items():
            _check_same(f"optimizer state of {name}", set(tensors), set(state[name]))
            for key, tensor in tensors.items():
                _check_tensor(f"{key} of {name}", tensor, state[name][key])
        for name, tensors in own.items():
            for key, tensor in tensors.items():
                tensor.copy_(state[name][key])
        self._steps = int(extra["step"])
        for slot in self._slots.values():
            slot.step.fill_(self._steps)
        self.skipped_in_a_row = int(extra["skipped_in_a_row"])
        self.scaler.load_state(extra["loss_scaler"])
        self._copy_back()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """After weights were loaded without the optimizer's state."""
        for name in self._halves:
            self._slots[name].tensor.copy_(self.grads.parameter(name))

    def _update(self, lr: float, weight_decay: float) -> None:
        for rule, names in self._groups.items():
            slots, grads = [self._slots[name] for name in names], [self.grads.grad(name) for name in names]
            self._update_rule.update(slots, grads, lr * rule.lr_mult, weight_decay * rule.wd_mult)
        self._steps += 1
        self._copy_back()

    def _copy_back(self) -> None:
        if self._halves:
            params = [self.grads.parameter(name).data for name in self._halves]
            torch._foreach_copy_(params, [self._slots[name].tensor for name in self._halves])

    def _by_axes(
        self, tensors: list[tuple[str, torch.Tensor]], counted: bool = True
    ) -> dict[SplitOver, list[torch.Tensor]]:
        """What counts, or the copies of what another rank counts."""
        groups: dict[SplitOver, list[torch.Tensor]] = {axes: [] for axes in self._norm_axes}
        for name, tensor in tensors:
            spec = self._specs.get(name)
            if spec is None:
                parts = [tensor] if counted else []
            else:
                parts = spec.counted(tensor) if counted else spec.copied(tensor)
            groups.setdefault(self._split_over.get(name, ()), []).extend(parts)
        return groups


def _master(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.dtype in (torch.float16, torch.bfloat16):
        return parameter.detach().float().clone(memory_format=torch.contiguous_format)
    return parameter


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

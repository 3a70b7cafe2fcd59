"""One optimizer step: unscale, check for non-finite numbers, clip, update in full precision, round back.

    (loss * optimizer.loss_scale).backward(); grads.reduce()
    info = optimizer.step(lr, weight_decay)

Half-precision parameters have fp32 masters, which the update changes; fp32 and fp64 parameters are updated directly.

With `asynchronous`, the host reads no result while a step runs. `start_step` launches the step and returns its outcome
as a tensor; `settle` takes the values once they are on the host. The next backward pass may already be in flight then,
so the device also keeps the loss scale.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import TrainingStore
from megatron.errors import CheckpointError
from megatron.ops import Kernels
from megatron.optimizer.build_update import build_update
from megatron.optimizer.decision import decide, decide_on_host
from megatron.optimizer.groups import GroupRule, Rates
from megatron.optimizer.loss_scaler import DynamicLossScaler, LossScaler, ScaleOnDevice, build_loss_scaler
from megatron.optimizer.norms import (
    CountedParts,
    SplitOver,
    SquareSum,
    global_norm,
    global_zeros,
    norm_on_host,
    square_sum_for,
    sum_on_device,
)
from megatron.optimizer.rules.base import WHOLE_KINDS
from megatron.optimizer.update_rules import OptimizerState, Update, UserUpdate
from megatron.state.division import Range
from megatron.state.shard import Shard

ExtraState = dict[str, Any]
"""Plain numbers: step, skipped_in_a_row, loss_scaler."""

REPORT_SIZE = 3
"""Length of the tensor that `start_step` returns."""


def megatron_rule(name: str, parameter: nn.Parameter) -> GroupRule:
    """Disables weight decay for biases and one-dimensional parameters."""
    return GroupRule(wd_mult=0.0 if name.endswith(".bias") or parameter.dim() <= 1 else 1.0)


@dataclass(frozen=True)
class StepInfo:
    """Outcome of a step."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping, without the loss scale."""
    skipped: bool
    """True if no parameter changed because the gradient is not finite."""
    loss_scale: float
    """Scale of this step's loss."""
    clipped: bool = False
    skipped_in_a_row: int = 0


class Optimizer:
    """Masters, moments and the loss scale of the parameters in `store`."""

    def __init__(
        self,
        store: TrainingStore,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        *,
        rule: Callable[[str, nn.Parameter], GroupRule] = megatron_rule,
        split_over: Mapping[str, SplitOver] | None = None,
        norm_axes: Sequence[SplitOver] = (),
        specs: Mapping[str, Shard] | None = None,
        kernels: Kernels | None = None,
        asynchronous: bool = False,
        client: UserUpdate | None = None,
    ) -> None:
        """Builds the update and the loss scaler. The function `rule` returns the settings of a parameter's group.
        A parameter is split over its axes in `split_over`; default: none. All ranks must sum over the same axes, so
        `norm_axes` lists such axes (with ZeRO's) of all ranks. A shard in `specs` describes which elements other ranks
        hold too. The user's own optimizer is `client`."""
        self.store = store
        self.scaler: LossScaler = build_loss_scaler(precision)
        self.skipped_in_a_row = 0
        self.asynchronous = asynchronous
        self._clip_grad = config.clip_grad
        specs = dict(specs or {})
        self.shards = state_shards(store, specs)
        self._by_axes = CountedParts(store, split_over or {}, self.shards, norm_axes)
        self._device = store.device
        rules = {name: rule(name, store.parameter(name)) for name in store.names}
        self._client = client
        self._update: Update | UserUpdate = client or build_update(
            store, config, rules, specs, kernels, self._device, asynchronous
        )
        # The tensors may be on the host even if the model computes on a device.
        self._square_sum: SquareSum = partial(sum_on_device, square_sum_for(kernels, asynchronous), store.device)
        self._scale_on_device: ScaleOnDevice | None = None
        if asynchronous and isinstance(self.scaler, DynamicLossScaler):
            self._scale_on_device = ScaleOnDevice(self.scaler, self._device)
        self._steps = 0

    @property
    def _own_update(self) -> Update:
        assert self._client is None, "the user's own optimizer makes the update"
        return cast(Update, self._update)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, after the settled steps."""
        return self.scaler.scale

    @property
    def next_loss_scale(self) -> float | Tensor:
        """Factor on the next loss. With a step in flight, only the device knows it."""
        return self.scaler.scale if self._scale_on_device is None else self._scale_on_device.scale.clone()

    @property
    def static_scale(self) -> bool:
        """True if a non-finite gradient is an error; with a dynamic loss scale it is expected now and then."""
        return not isinstance(self.scaler, DynamicLossScaler)

    def step(
        self, lr: float, weight_decay: float, grad_scale: float | None = None, decoupled_lr: float | None = None
    ) -> StepInfo:
        """Updates the parameters from the reduced gradients, unless one of these is not finite.

        `grad_scale`: factor by which the buffers exceed the true gradients. Default: the loss scale. Multiply it by any
        other factor on the loss.
        """
        return self.settle(self.start_step(Rates(lr, weight_decay, decoupled_lr), grad_scale).tolist())

    @torch.no_grad()
    def client_step(self, grad_scale: float) -> StepInfo:
        """Does a `step` with the user's own optimizer: the host reads the norm and decides about the update."""
        assert self._client is not None
        norm = norm_on_host(self._by_axes(self.store.flat_grads()), self._norm)
        decision = decide_on_host(norm, grad_scale, self._clip_grad)
        self._client.step(decision)
        self.store.publish()
        return self.settle(decision.report())

    @torch.no_grad()
    def start_step(
        self,
        rates: Rates,
        grad_scale: float | Tensor | None = None,
        finite: Tensor | None = None,
    ) -> Tensor:
        """Starts a `step` and leaves its outcome on the device. `finite`: another condition for the update."""
        grads = list(self.store.grads())
        copies = self._by_axes(grads, counted=False)
        norm = self._norm(self._by_axes(grads), copies)
        decision = decide(norm, self.next_loss_scale if grad_scale is None else grad_scale, self._clip_grad, finite)
        self._own_update.step(decision, rates)
        self.store.publish()
        if self._scale_on_device is not None:
            self._scale_on_device.update(decision.applied == 0)
        return decision.report()

    def settle(self, report: Sequence[float]) -> StepInfo:
        """Updates the host's counters and loss scale with the report of the oldest unsettled step."""
        norm, applied, clipped = report
        scale, skipped = self.scaler.scale, not applied
        self.scaler.update(overflow=skipped)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self._steps += not skipped
        return StepInfo(norm, skipped, scale, bool(clipped), self.skipped_in_a_row)

    def count_zeros(self) -> Tensor:
        """Number of elements of the reduced gradients that are exactly zero, over the whole model."""
        return global_zeros(self._by_axes(list(self.store.grads())), self._device)

    @torch.no_grad()
    def params_norm(self) -> Tensor:
        """Global L2 norm of the parameters; for half-precision ones, of their masters."""
        state = self.state()
        weights = [(name, state[name].get("master", self.store.weight(name))) for name in state]
        return self._norm(self._by_axes(weights))

    def _norm(
        self, tensors: Mapping[SplitOver, Sequence[Tensor]], copies: Mapping[SplitOver, Sequence[Tensor]] | None = None
    ) -> Tensor:
        return global_norm(tensors, copies, square_sum=self._square_sum, device=self._device)

    def state(self) -> OptimizerState:
        """Moments of this rank's piece by parameter name, and `master` for half-precision parameters."""
        found = self._update.state()
        return {name: found[name] for name in self.store.names}

    def loadable_in_place(self) -> OptimizerState:
        """Tensors of `state()` into which a checkpoint may be read; pass the same ones to `load_state` afterwards."""
        return {} if self._client is not None else self._own_update.loadable_in_place()

    def held(self, name: str) -> Range | None:
        """Range of a parameter's elements that `state()` holds; None for all."""
        division = self.store.divisions.get(name)  # a checkpoint may also name parameters that are frozen now
        return None if division is None else division.held

    def extra_state(self) -> ExtraState:
        """Rest of the state: plain numbers, the same on every rank."""
        client = {} if self._client is None else {"client": self._client.extra()}
        scaler = self.scaler.state()
        return {"step": self._steps, "skipped_in_a_row": self.skipped_in_a_row, "loss_scaler": scaler, **client}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[str, torch.Tensor]], extra: Mapping[str, Any]) -> None:
        """Restores `state()` and `extra_state()`; half-precision parameters are rounded from their masters."""
        own = self.state()
        _check_same("optimizer's parameters", set(own), set(state))
        _check_same("optimizer's counters", set(self.extra_state()), set(extra))
        self._steps = int(extra["step"])
        if self._client is not None:
            self._client.load(state, extra["client"])
        else:
            self._check_tensors(own, state)
            self._own_update.load(state, self._steps)
        self.store.publish()
        self.skipped_in_a_row = int(extra["skipped_in_a_row"])
        self.scaler.load_state(extra["loss_scaler"])
        if self._scale_on_device is not None:
            self._scale_on_device.follow()

    def _check_tensors(self, own: OptimizerState, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, tensors in own.items():
            _check_same(f"optimizer's tensors of {name}", set(tensors), set(saved[name]))
            for key, tensor in tensors.items():
                _check_tensor(f"{key} of {name}", tensor.shape, tensor.dtype, saved[name][key])

    def refresh_masters(self) -> None:
        """Sets the masters after weights were loaded without the optimizer's state."""
        self._update.refresh_masters()


def state_shards(store: TrainingStore, specs: Mapping[str, Shard]) -> dict[str, Shard]:
    """Shards of the optimizer's state: the weights' shards, restricted to what this rank updates."""
    return {name: replace(specs[name], division=store.divisions[name]) for name in store.names if name in specs}


def state_spec(spec: Shard, kind: str, tensor: Tensor) -> Shard:
    """Returns the shard of a state tensor: the parameter's shard, or the whole tensor for WHOLE_KINDS."""
    return Shard(spec.name, tuple(tensor.shape)) if kind in WHOLE_KINDS else spec


def _check_same(what: str, here: set[str], saved: set[str]) -> None:
    if here == saved:
        return
    missing, unknown = sorted(here - saved), sorted(saved - here)
    parts = [f"missing in the checkpoint: {', '.join(missing[:5])}"] if missing else []
    parts += [f"not in this model: {', '.join(unknown[:5])}"] if unknown else []
    raise CheckpointError(
        f"the {what} in the checkpoint do not match ({'; '.join(parts)}); give --no-load-optim to start the optimizer "
        "anew"
    )


def _check_tensor(what: str, shape: torch.Size, dtype: torch.dtype, saved: torch.Tensor) -> None:
    if shape != saved.shape or dtype != saved.dtype:
        raise CheckpointError(
            f"{what} is {saved.dtype} {tuple(saved.shape)} in the checkpoint and {dtype} {tuple(shape)} "
            "here; give --no-load-optim to start the optimizer anew"
        )

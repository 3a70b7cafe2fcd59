"""AdamW over flat tensors: one kernel launch updates the weights and moments of many parameters.

The state is on the weights' device (`Resident`) or on the host (`adam_offload.py`). In a checkpoint it has the same
names as the state of `TorchUpdate`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.ops.optim import join_fp32, split_fp32
from megatron.optimizer.decision import Decision
from megatron.optimizer.groups import GroupRule, Rates
from megatron.optimizer.update_rules import OptimizerState
from megatron.state.store import FlatRun, are_masters
from megatron.utils.dtype import HALF


class Resident:
    """Keeps Adam's state of some flat tensors on the weights' device. Subclasses keep it elsewhere."""

    loads_in_place = True
    """True if a checkpoint may be read directly into the state tensors."""

    def __init__(self, runs: Sequence[FlatRun], *, remainders: bool = False) -> None:
        """Allocates the state. `remainders`: keep only the low 16 bits of a bf16 parameter's fp32 master."""
        self.runs = runs
        # the device that updates the runs
        self.device = next((run.weights.device for run in runs), torch.device("cpu"))
        for run in runs:
            wide = torch.promote_types(run.grads.dtype, torch.float32)
            moments = torch.zeros((2, run.weights.numel()), dtype=wide, device=self.device)
            run.kinds.clear()
            run.kinds.update(exp_avg=moments[0], exp_avg_sq=moments[1])
            if remainders and run.weights.dtype == torch.bfloat16:
                run.kinds["remainder"] = torch.zeros_like(run.weights, dtype=torch.int16)
            elif run.weights.dtype in HALF:
                run.kinds["master"] = run.weights.float()

    def start(self, decision: Decision) -> Decision | None:
        """Begins an update. Returns the decision on the device that updates; None if the host knows that the update is
        skipped."""
        return decision

    def sweep(self, *, changes: bool = True, refreshed: bool = False) -> Iterator[FlatRun]:
        """Yields each flat tensor of `runs` with its state in `kinds`, on the device that updates. Changes are stored
        and copied to the model, unless `changes` is False. With `refreshed`, the weights are first read from the
        model."""
        del changes, refreshed
        return iter(self.runs)


@dataclass(frozen=True)
class _Factors:
    """Factors on learning rate and weight decay for each part of a `FlatRun`, on the device that updates."""

    ends: Tensor
    """End of each part in the flat tensor."""
    factors: Tensor
    """[parts, 2]: factors on learning rate and weight decay."""
    decoupled: Tensor
    """[parts]: True for parts with the decoupled learning rate."""

    @staticmethod
    def of(run: FlatRun, rules: Mapping[str, GroupRule], device: torch.device) -> "_Factors":
        groups, wide = [rules[name] for name in run.names], torch.promote_types(run.grads.dtype, torch.float32)
        return _Factors(
            torch.tensor(run.ends).to(device),
            torch.tensor([[group.lr_mult, group.wd_mult] for group in groups], dtype=wide).to(device),
            torch.tensor([group.decoupled for group in groups]).to(device),
        )

    def at(self, rates: Rates) -> Tensor:
        """Factors on the rates in `step_control`. With --decoupled-lr, the factors include the learning rate of each
        part, and `step_control` has 1 as its learning rate. Rounding is then the same as with one learning rate."""
        if rates.decoupled_lr is None:
            return self.factors
        lr = torch.full_like(self.factors[:, 0], rates.lr).masked_fill_(self.decoupled, rates.decoupled_lr)
        return torch.stack([self.factors[:, 0] * lr, self.factors[:, 1]], 1)


class _Part:
    """Flat tensors whose state is in the same memory (device or host)."""

    def __init__(self, memory: Resident, store: TrainingStore, rules: Mapping[str, GroupRule]) -> None:
        self.memory = memory
        self.factors = [_Factors.of(run, rules, memory.device) for run in memory.runs]
        self.are_masters = [are_masters(store, run) for run in memory.runs]
        self.steps = torch.zeros((), dtype=torch.float64, device=memory.device)
        wide = any(run.grads.dtype == torch.float64 for run in memory.runs)
        self.precision = torch.float64 if wide else torch.float32


class FlatAdam:
    def __init__(
        self,
        store: TrainingStore,
        rules: Mapping[str, GroupRule],
        betas: tuple[float, float],
        eps: float,
        kernel: Callable[..., None],
        memories: Sequence[Resident],
    ) -> None:
        """`memories`: the store's flat tensors, grouped by where their state is kept."""
        self._betas, self._eps, self._kernel = betas, eps, kernel
        self._parts = [_Part(memory, store, rules) for memory in memories]
        weights = {name: store.weight(name) for name in store.names}
        self._layouts = {name: (weight.shape, weight.stride()) for name, weight in weights.items()}

    @torch.no_grad()
    def step(self, decision: Decision, rates: Rates) -> None:
        for part in self._parts:
            decided = part.memory.start(decision)
            if decided is None:
                continue
            steps = part.steps.add_(decided.applied)
            control = step_control(decided, steps, rates, self._betas).to(part.precision)
            for run, factors in zip(part.memory.sweep(), part.factors, strict=True):
                moments = run.kinds["exp_avg"], run.kinds["exp_avg_sq"]
                places = factors.ends, factors.at(rates)
                self._kernel(*_weights(run), *moments, run.grads, *places, control, *self._betas, self._eps)

    def state(self) -> OptimizerState:
        """Returns live tensors, or copies if the state is in a file. With --store-param-remainders, this call computes
        the masters."""
        found: OptimizerState = {}
        for part in self._parts:
            for run, masters in zip(part.memory.sweep(changes=False), part.are_masters, strict=True):
                for kind, flat in _saved(run, masters).items():
                    for name, tensor in self._views(run, flat):
                        found.setdefault(name, {})[kind] = tensor
        return found

    def loadable_in_place(self) -> OptimizerState:
        found: OptimizerState = {}
        for part in self._parts:
            for run in part.memory.runs if part.memory.loads_in_place else ():
                for kind in ("exp_avg", "exp_avg_sq", *(["master"] if "master" in run.kinds else [])):
                    for name, tensor in self._views(run, run.kinds[kind]):
                        found.setdefault(name, {})[kind] = tensor
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Restores the state; half-precision parameters are rounded from their masters."""
        for part in self._parts:
            part.steps.fill_(steps)
            for run, masters in zip(part.memory.sweep(refreshed=True), part.are_masters, strict=True):
                saved = _saved(run, masters)
                for kind, flat in saved.items():
                    for name, tensor in self._views(run, flat):
                        if state[name][kind].data_ptr() != tensor.data_ptr():  # else it was read into its place
                            tensor.copy_(state[name][kind])
                if "master" in saved and not masters:
                    _set_masters(run, saved["master"])

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for part in self._parts:
            for run in part.memory.sweep(refreshed=True):
                if run.kinds.keys() & {"master", "remainder"}:
                    _set_masters(run, run.weights.float())

    def _views(self, run: FlatRun, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields a view of each part of a flat tensor, with the parameter's shape and strides."""
        return ((name, flat[place].as_strided(*self._layouts[name])) for name, place in run.places())


def _weights(run: FlatRun) -> tuple[Tensor, Tensor]:
    """Returns the weights to update, and the model's rounded copy or the low bits of the masters."""
    if "master" in run.kinds:
        return run.kinds["master"], run.weights
    if "remainder" in run.kinds:
        return run.weights, run.kinds["remainder"]
    return run.weights, torch.empty(0, dtype=torch.bfloat16, device=run.weights.device)


def _saved(run: FlatRun, are_masters: bool) -> dict[str, Tensor]:
    """State of a flat tensor by kind, as in a checkpoint."""
    found = {kind: tensor for kind, tensor in run.kinds.items() if kind != "remainder"}
    if "remainder" in run.kinds:
        found["master"] = join_fp32(run.weights, run.kinds["remainder"])
    elif are_masters:
        found["master"] = run.weights
    return found


def _set_masters(run: FlatRun, masters: Tensor) -> None:
    """Sets the masters and rounds them into the model's weights."""
    if "remainder" in run.kinds:
        for kept, new in zip(_weights(run), split_fp32(masters), strict=True):
            kept.copy_(new)
    elif "master" in run.kinds:
        run.kinds["master"].copy_(masters)
        run.weights.copy_(masters)


def step_control(decision: Decision, steps: Tensor, rates: Rates, betas: tuple[float, float]) -> Tensor:
    """Returns six numbers in one tensor: 1 (0 for a skipped step), factor on gradients, learning rate, weight decay,
    bias correction of the first moment, square root of the bias correction of the second."""
    numbers = [
        decision.applied,
        decision.factor,
        torch.full_like(steps, rates.lr if rates.decoupled_lr is None else 1.0),
        torch.full_like(steps, rates.weight_decay),
        1.0 - torch.pow(betas[0], steps),
        (1.0 - torch.pow(betas[1], steps)).sqrt(),
    ]
    return torch.stack([number.to(steps.dtype) for number in numbers])

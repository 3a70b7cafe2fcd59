"""AdamW over flat buffers through csrc/: weights, moments and gradients of many parameters in one launch.

Masters and moments are flat tensors too, in the order of the gradients. By name they are the same tensors as with
torch's update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.ops.optim import join_fp32, split_fp32
from megatron.optimizer.decision import Decision
from megatron.optimizer.groups import GroupRule, Rates
from megatron.optimizer.places import Places
from megatron.optimizer.update_rules import OptimizerState
from megatron.state.store import FlatRun, are_masters
from megatron.utils.dtype import HALF


@dataclass(frozen=True)
class _Segment:
    """Pieces that lie one after the other."""

    places: Places
    grad: Tensor
    weights: Tensor
    """fp32; with remainders the model's own bf16 weights."""
    beside: Tensor
    """The model's half-precision weights, or the remainders; empty where fp32 weights are the model's own."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    are_masters: bool
    """The model's own pieces are masters, which it rounds when it gathers them."""

    @property
    def has_masters(self) -> bool:
        return self.beside.numel() > 0

    @property
    def has_remainders(self) -> bool:
        return self.beside.dtype == torch.int16

    def loadable_in_place(self) -> dict[str, Tensor]:
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        own_masters = self.has_masters and not self.has_remainders
        return {**moments, "master": self.weights} if own_masters else moments

    def state(self) -> dict[str, Tensor]:
        """The live tensors; with remainders the masters are computed for the call."""
        found = self.loadable_in_place()
        if self.has_remainders:
            found["master"] = join_fp32(self.weights, self.beside)
        elif self.are_masters:
            found["master"] = self.weights
        return found

    def set_masters(self, masters: Tensor) -> None:
        """Also sets the model's own weights: the masters, rounded."""
        halves = split_fp32(masters) if self.has_remainders else (masters, masters)
        for kept, new in zip((self.weights, self.beside), halves, strict=True):
            kept.copy_(new)


class FlatAdam:
    def __init__(
        self,
        grads: TrainingStore,
        rules: Mapping[str, GroupRule],
        betas: tuple[float, float],
        eps: float,
        kernel: Callable[..., None],
        *,
        remainders: bool = False,
        buffers: Iterable[FlatRun] | None = None,
    ) -> None:
        """`remainders`: of the fp32 master of a bf16 parameter, keep only the 16 bits that the parameter lacks.
        `buffers`: those of `grads` that are updated here. Unset: all."""
        self._betas, self._eps, self._kernel = betas, eps, kernel
        flat = grads.runs() if buffers is None else buffers
        self._segments = [_segment(grads, pieces, rules, remainders) for pieces in flat]
        self._precision = torch.float64 if any(s.grad.dtype == torch.float64 for s in self._segments) else torch.float32
        device = next((segment.weights.device for segment in self._segments), torch.device("cpu"))
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def step(self, decision: Decision, rates: Rates) -> None:
        control = step_control(decision, self._steps.add_(decision.applied), rates, self._betas).to(self._precision)
        for segment in self._segments:
            weights, moments = (segment.weights, segment.beside), (segment.exp_avg, segment.exp_avg_sq)
            places = segment.places.ends, segment.places.factors_at(rates)
            self._kernel(*weights, *moments, segment.grad, *places, control, *self._betas, self._eps)

    def state(self) -> OptimizerState:
        """The live tensors; with remainders the masters are computed for the call."""
        return self._by_name(_Segment.state)

    def loadable_in_place(self) -> OptimizerState:
        return self._by_name(_Segment.loadable_in_place)

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Half-precision parameters are rounded from their masters."""
        self._steps.fill_(steps)
        for segment in self._segments:
            flats = segment.state()
            for kind, flat in flats.items():
                for name, part in segment.places.views(flat):
                    if state[name][kind].data_ptr() != part.data_ptr():  # else it was read into its place
                        part.copy_(state[name][kind])
            if segment.has_masters:
                segment.set_masters(flats["master"])

    def _by_name(self, flats: Callable[[_Segment], dict[str, Tensor]]) -> OptimizerState:
        found: OptimizerState = {}
        for segment in self._segments:
            for kind, flat in flats(segment).items():
                for name, part in segment.places.views(flat):
                    found.setdefault(name, {})[kind] = part
        return found

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for segment in self._segments:
            if segment.has_masters:
                segment.set_masters((segment.weights if segment.has_remainders else segment.beside).float())


def step_control(decision: Decision, steps: Tensor, rates: Rates, betas: tuple[float, float]) -> Tensor:
    """[whether there is an update, factor on gradients, learning rate, decay, corrections of the two moments]."""
    numbers = [
        decision.applied,
        decision.factor,
        torch.full_like(steps, rates.lr if rates.decoupled_lr is None else 1.0),
        torch.full_like(steps, rates.weight_decay),
        1.0 - torch.pow(betas[0], steps),
        (1.0 - torch.pow(betas[1], steps)).sqrt(),
    ]
    return torch.stack([number.to(steps.dtype) for number in numbers])


def _segment(grads: TrainingStore, flat: FlatRun, rules: Mapping[str, GroupRule], remainders: bool) -> _Segment:
    own, device = flat.weights, flat.weights.device
    weights, beside = own, torch.empty(0, dtype=torch.bfloat16, device=device)
    if remainders and own.dtype == torch.bfloat16:
        beside = torch.zeros_like(own, dtype=torch.int16)
    elif own.dtype in HALF:
        weights, beside = own.float(), own
    wide = torch.promote_types(flat.grads.dtype, torch.float32)
    moments = torch.zeros((2, own.numel()), dtype=wide, device=device)
    places = Places.of(grads, flat, rules, device)
    return _Segment(places, flat.grads, weights, beside, moments[0], moments[1], are_masters(grads, flat))

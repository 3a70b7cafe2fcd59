"""AdamW over flat buffers through csrc/: weights, moments and gradients of many parameters in one launch.

The parameters of a gradient bucket become views of one buffer, in the bucket's order, and so do their fp32 masters.
A checkpoint holds the same tensors as with torch's update, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megatron.data_parallel import GradBuffers
from megatron.ops.optim import joined, split
from megatron.optimizer.decision import Decision
from megatron.optimizer.update_rules import GroupRule, OptimizerState

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Segment:
    """Consecutive parameters of one gradient bucket with the same dtype."""

    names: list[str]
    places: list[slice]
    grad: Tensor
    weights: Tensor
    """fp32; with remainders the model's own bf16 weights."""
    beside: Tensor
    """The model's half-precision weights, or the remainders; empty where fp32 weights are the model's own."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    ends: Tensor
    """The end of each parameter; `rates` are its factors on learning rate and weight decay."""
    rates: Tensor

    def of(self, flat: Tensor, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The views of a flat tensor that belong to the parameters, in their shapes."""
        for name, place in zip(self.names, self.places, strict=True):
            yield name, flat[place].view(like[name].shape)

    @property
    def has_masters(self) -> bool:
        return self.beside.numel() > 0

    @property
    def has_remainders(self) -> bool:
        return self.beside.dtype == torch.int16

    def state(self) -> dict[str, Tensor]:
        """The live tensors; with remainders the masters are computed for the call."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if not self.has_masters:
            return moments
        return {**moments, "master": joined(self.weights, self.beside) if self.has_remainders else self.weights}

    def set_masters(self, masters: Tensor) -> None:
        """Also sets the model's own weights: the masters, rounded."""
        halves = split(masters) if self.has_remainders else (masters, masters)
        for kept, new in zip((self.weights, self.beside), halves, strict=True):
            kept.copy_(new)


class FlatAdam:
    def __init__(
        self,
        grads: GradBuffers,
        rules: Mapping[str, GroupRule],
        betas: tuple[float, float],
        eps: float,
        kernel: Callable[..., None],
        *,
        remainders: bool = False,
    ) -> None:
        """`remainders`: of the fp32 master of a bf16 parameter, keep only the 16 bits that the parameter lacks."""
        self._betas, self._eps, self._kernel = betas, eps, kernel
        self._params = {name: grads.parameter(name) for name in grads.names}
        self._remainders = remainders
        buffers = grads.flat_buffers()
        self._segments = [part for names, buffer in buffers for part in self._make_segments(names, buffer, rules)]
        device = next((segment.weights.device for segment in self._segments), torch.device("cpu"))
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def step(self, decision: Decision, lr: float, weight_decay: float) -> None:
        steps = self._steps.add_(decision.applied)
        beta1, beta2 = self._betas
        numbers = [
            decision.applied,
            decision.factor,
            torch.full_like(steps, lr),
            torch.full_like(steps, weight_decay),
            1.0 - torch.pow(beta1, steps),
            (1.0 - torch.pow(beta2, steps)).sqrt(),
        ]
        control = torch.stack(numbers).float()
        for segment in self._segments:
            weights, moments = (segment.weights, segment.beside), (segment.exp_avg, segment.exp_avg_sq)
            self._kernel(
                *weights, *moments, segment.grad, segment.ends, segment.rates, control, *self._betas, self._eps
            )

    def state(self) -> OptimizerState:
        """The live tensors; with remainders the masters are computed for the call."""
        found: OptimizerState = {}
        for segment in self._segments:
            for kind, flat in segment.state().items():
                for name, part in segment.of(flat, self._params):
                    found.setdefault(name, {})[kind] = part
        return {name: found[name] for name in self._params}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Half-precision parameters are rounded from their masters."""
        self._steps.fill_(steps)
        for segment in self._segments:
            flats = segment.state()
            for kind, flat in flats.items():
                for name, part in segment.of(flat, self._params):
                    part.copy_(state[name][kind])
            if segment.has_masters:
                segment.set_masters(flats["master"])

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for segment in self._segments:
            if segment.has_masters:
                segment.set_masters((segment.weights if segment.has_remainders else segment.beside).float())

    def _make_segments(self, names: list[str], buffer: Tensor, rules: Mapping[str, GroupRule]) -> Iterator[_Segment]:
        start = 0
        for _, members in groupby(names, key=lambda name: self._params[name].dtype):
            mine = list(members)
            size = sum(self._params[name].numel() for name in mine)
            yield self._make_segment(mine, buffer[start : start + size], rules)
            start += size

    def _make_segment(self, names: list[str], grad: Tensor, rules: Mapping[str, GroupRule]) -> _Segment:
        params = [self._params[name] for name in names]
        own = torch.cat([param.detach().reshape(-1) for param in params])
        ends = torch.tensor([param.numel() for param in params]).cumsum(0)
        places = [slice(end - param.numel(), end) for end, param in zip(ends.tolist(), params, strict=True)]
        for param, place in zip(params, places, strict=True):
            param.data = own[place].view(param.shape)  # from here on the model computes with the flat buffer
        empty = torch.empty(0, dtype=torch.bfloat16, device=own.device)
        weights, beside = own, empty
        if self._remainders and own.dtype == torch.bfloat16:
            beside = torch.zeros_like(own, dtype=torch.int16)
        elif own.dtype in _HALF:
            weights, beside = own.float(), own
        moments = torch.zeros((2, own.numel()), dtype=torch.float32, device=own.device)
        rates = torch.tensor([[rules[name].lr_mult, rules[name].wd_mult] for name in names], dtype=torch.float32)
        return _Segment(
            names, places, grad, weights, beside, moments[0], moments[1], ends.to(own.device), rates.to(own.device)
        )

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
class _Run:
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
        self._runs = [run for names, buffer in grads.flat_buffers() for run in self._make_runs(names, buffer, rules)]
        device = next((run.weights.device for run in self._runs), torch.device("cpu"))
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
        for run in self._runs:
            moments = run.exp_avg, run.exp_avg_sq
            self._kernel(
                run.weights, run.beside, *moments, run.grad, run.ends, run.rates, control, *self._betas, self._eps
            )

    def state(self) -> OptimizerState:
        """The live tensors; with remainders the masters are computed for the call."""
        found: OptimizerState = {}
        for run in self._runs:
            kinds = {"exp_avg": run.exp_avg, "exp_avg_sq": run.exp_avg_sq}
            if self._has_masters(run):
                kinds["master"] = self._masters(run)
            for kind, flat in kinds.items():
                for name, part in run.of(flat, self._params):
                    found.setdefault(name, {})[kind] = part
        return {name: found[name] for name in self._params}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Half-precision parameters are rounded from their masters."""
        self._steps.fill_(steps)
        for run in self._runs:
            flats = {"exp_avg": run.exp_avg, "exp_avg_sq": run.exp_avg_sq}
            if self._has_masters(run):
                flats["master"] = self._masters(run)
            for kind, flat in flats.items():
                for name, part in run.of(flat, self._params):
                    part.copy_(state[name][kind])
            if self._has_masters(run):
                self._set_masters(run, flats["master"])

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for run in self._runs:
            if self._has_masters(run):
                self._set_masters(run, (run.weights if self._kept_as_remainders(run) else run.beside).float())

    def _make_runs(self, names: list[str], buffer: Tensor, rules: Mapping[str, GroupRule]) -> Iterator[_Run]:
        start = 0
        for _, members in groupby(names, key=lambda name: self._params[name].dtype):
            mine = list(members)
            size = sum(self._params[name].numel() for name in mine)
            yield self._make_run(mine, buffer[start : start + size], rules)
            start += size

    def _make_run(self, names: list[str], grad: Tensor, rules: Mapping[str, GroupRule]) -> _Run:
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
        return _Run(
            names, places, grad, weights, beside, moments[0], moments[1], ends.to(own.device), rates.to(own.device)
        )

    def _has_masters(self, run: _Run) -> bool:
        return run.beside.numel() > 0

    def _kept_as_remainders(self, run: _Run) -> bool:
        return run.beside.dtype == torch.int16

    def _masters(self, run: _Run) -> Tensor:
        if not self._kept_as_remainders(run):
            return run.weights
        return joined(run.weights, run.beside)

    def _set_masters(self, run: _Run, masters: Tensor) -> None:
        """Also sets the model's own weights: the masters, rounded."""
        if not self._kept_as_remainders(run):
            run.weights.copy_(masters)
            run.beside.copy_(masters)
            return
        for kept, new in zip((run.weights, run.beside), split(masters), strict=True):
            kept.copy_(new)

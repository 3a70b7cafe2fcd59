"""AdamW on the CPU for a model on any device: moments and masters are in host memory, or in a file.

Gradients come to the host while the device is still at other work, are used buffer by buffer, and the new weights go
back while the next buffer is updated. A file's part of the state is read one buffer ahead and written behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import TrainingStore
from megatron.ops.optim import adamw_in_place
from megatron.optimizer.decision import Decision
from megatron.optimizer.flat import FlatAdam, step_control
from megatron.optimizer.groups import GroupRule, Rates
from megatron.optimizer.places import Places
from megatron.optimizer.update_rules import OptimizerState, Update
from megatron.state.store import FlatRun, are_masters, run_alone
from megatron.utils.device import HostLink
from megatron.utils.disk_tensors import DiskTensors
from megatron.utils.dtype import HALF

DIRECTORY_FLAG = "--optimizer-offload-directory"


class States(Protocol):
    """One flat tensor for each buffer."""

    def sweep(self, *, changes: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yields each tensor with its number. Changes made to it are kept, unless `changes` is False."""
        ...


class HostTensors:
    """Tensors in host memory."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self._tensors = [torch.zeros(length, dtype=dtype) for length in lengths]

    def sweep(self, *, changes: bool = True) -> Iterator[tuple[int, Tensor]]:
        del changes
        return iter(enumerate(self._tensors))


@dataclass(frozen=True)
class _Buffer:
    """Pieces that are adjacent on the device, and their copies on the host."""

    places: Places
    on_device: FlatRun
    grads: Callable[[], Tensor]
    """The gradients on the host: the device's own, if the device is the host."""
    weights: Tensor
    """The model's weights on the host, in its type."""
    are_masters: bool
    """The device's own pieces are the fp32 masters of a model that computes in half precision."""

    @property
    def has_masters(self) -> bool:
        return self.weights.dtype in HALF

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of optimizer state that are kept for it."""
        return ("exp_avg", "exp_avg_sq", "master") if self.has_masters else ("exp_avg", "exp_avg_sq")

    def parts(self, state: Tensor) -> dict[str, Tensor]:
        count = len(self.kinds)
        return dict(zip(self.kinds, state.view(count, state.numel() // count).unbind(), strict=True))


class OffloadedAdam:
    def __init__(
        self,
        grads: TrainingStore,
        buffers: Sequence[FlatRun],
        rules: Mapping[str, GroupRule],
        betas: tuple[float, float],
        eps: float,
        kernel: Callable[..., None],
        *,
        directory: Path | None = None,
        link: HostLink | None = None,
    ) -> None:
        """`kernel` updates tensors on the host. `directory`: where the state's file is; None: the state is in memory.
        `link`: to the device, if that is not the host."""
        self._betas, self._eps, self._kernel, self._link = betas, eps, kernel, link
        self._buffers = [_buffer(grads, flat, rules, link) for flat in buffers]
        self._dtype = torch.float64 if any(flat.grads.dtype == torch.float64 for flat in buffers) else torch.float32
        lengths = [len(buffer.kinds) * buffer.weights.numel() for buffer in self._buffers]
        self._in_file = directory is not None
        self._states: States = HostTensors(lengths, self._dtype)
        if directory is not None:
            self._states = DiskTensors(directory, lengths, setting=DIRECTORY_FLAG, dtype=self._dtype)
        self._steps = torch.zeros((), dtype=torch.float64)
        self.refresh_masters()

    @torch.no_grad()
    def step(self, decision: Decision, rates: Rates) -> None:
        arrivals = [self._start_arrival(buffer) for buffer in self._buffers]
        on_host = decision.on_host()
        if not on_host.applied:
            return
        steps = self._steps.add_(1)
        control = step_control(on_host, steps, rates, self._betas).to(self._dtype)
        nothing = torch.empty(0, dtype=torch.bfloat16)
        for index, state in self._states.sweep():
            buffer = self._buffers[index]
            arrivals[index]()
            parts = buffer.parts(state)
            weights, copy = (parts["master"], buffer.weights) if buffer.has_masters else (buffer.weights, nothing)
            moments = parts["exp_avg"], parts["exp_avg_sq"]
            places = buffer.places.ends, buffer.places.factors_at(rates)
            self._kernel(weights, copy, *moments, buffer.grads(), *places, control, *self._betas, self._eps)
            self._start_return(buffer)
        self._join()

    def state(self) -> OptimizerState:
        """The live tensors; of a state in a file, copies."""
        found: OptimizerState = {}
        for index, state in self._states.sweep(changes=False):
            buffer = self._buffers[index]
            for kind, flat in buffer.parts(state.clone() if self._in_file else state).items():
                for name, part in buffer.places.views(flat):
                    found.setdefault(name, {})[kind] = part
            if buffer.are_masters:
                for name, part in buffer.places.views(buffer.on_device.weights):
                    found[name]["master"] = part
        return found

    def loadable_in_place(self) -> OptimizerState:
        """None: a file has another form, and memory on the host is for an accelerator, which no file is read into."""
        return {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Half-precision parameters are rounded from their masters."""
        self._steps.fill_(steps)
        for index, flat_state in self._states.sweep():
            buffer = self._buffers[index]
            parts = buffer.parts(flat_state)
            for kind, flat in parts.items():
                for name, part in buffer.places.views(flat):
                    part.copy_(state[name][kind])
            if buffer.are_masters:
                for name, part in buffer.places.views(buffer.on_device.weights):
                    part.copy_(state[name]["master"])
            if "master" in parts:
                buffer.weights.copy_(parts["master"])
                self._start_return(buffer)
            else:
                buffer.weights.copy_(buffer.on_device.weights)
        self._join()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for index, state in self._states.sweep():
            buffer = self._buffers[index]
            buffer.weights.copy_(buffer.on_device.weights)
            parts = buffer.parts(state)
            if "master" in parts:
                parts["master"].copy_(buffer.weights)

    def _start_arrival(self, buffer: _Buffer) -> Callable[[], None]:
        if self._link is None:
            return lambda: None
        return self._link.to_host(buffer.on_device.grads, buffer.grads())

    def _start_return(self, buffer: _Buffer) -> None:
        if self._link is not None:
            self._link.to_device(buffer.weights, buffer.on_device.weights)

    def _join(self) -> None:
        if self._link is not None:
            self._link.join()


def _buffer(grads: TrainingStore, flat: FlatRun, rules: Mapping[str, GroupRule], link: HostLink | None) -> _Buffer:
    weights, fetch = flat.weights, partial(_grads_of, grads, flat)
    if link is not None:
        weights, arrived = (link.empty(tensor.numel(), tensor.dtype) for tensor in (flat.weights, flat.grads))
        fetch = partial(_itself, arrived)
    places = Places.of(grads, flat, rules, torch.device("cpu"))
    return _Buffer(places, flat, fetch, weights, are_masters(grads, flat))


def _grads_of(grads: TrainingStore, flat: FlatRun) -> Tensor:
    """The gradients of these pieces. Read anew in each step, in which shards on the host have new gradient tensors."""
    return flat.grads if grads.flat else grads.grad(flat.names[0]).view(-1)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def build_offloaded(
    grads: TrainingStore,
    config: OptimizerConfig,
    rules: Mapping[str, GroupRule],
    kernel: Callable[..., None] | None,
    device: torch.device,
) -> Update:
    """`kernel`: the native AdamW, for fp32."""
    buffers = list(grads.runs()) if grads.flat else [run_alone(grads, name) for name in grads.names]
    wide = any(flat.grads.dtype == torch.float64 for flat in buffers)
    betas, eps, update = (config.adam_beta1, config.adam_beta2), config.adam_eps, kernel
    if update is None or wide:
        update = adamw_in_place
    count = share_of(buffers, config.optimizer_offload_fraction)
    directory = config.optimizer_offload_directory
    away = OffloadedAdam(
        grads,
        buffers[:count],
        rules,
        betas,
        eps,
        update,
        directory=None if directory is None else Path(directory),
        link=None if device.type == "cpu" else HostLink(device),
    )
    if count == len(buffers):
        return away
    return Divided((away, FlatAdam(grads, rules, betas, eps, update, buffers=buffers[count:])))


def share_of(buffers: Sequence[FlatRun], fraction: float) -> int:
    """How many of the buffers, the first ones, come closest to that fraction of all elements; one at least, unless it
    is 0."""
    sizes = [0, *accumulate(flat.weights.numel() for flat in buffers)]
    closest = min(range(len(sizes)), key=lambda count: abs(sizes[count] - fraction * sizes[-1]))
    return min(max(closest, 1), len(buffers)) if fraction > 0.0 else closest


@dataclass(frozen=True)
class Divided:
    """Several updates, each of its own parameters."""

    updates: Sequence[Update]

    def step(self, decision: Decision, rates: Rates) -> None:
        for update in self.updates:
            update.step(decision, rates)

    def state(self) -> OptimizerState:
        return {name: kinds for update in self.updates for name, kinds in update.state().items()}

    def loadable_in_place(self) -> OptimizerState:
        return {name: kinds for update in self.updates for name, kinds in update.loadable_in_place().items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        for update in self.updates:
            update.load(state, steps)

    def refresh_masters(self) -> None:
        for update in self.updates:
            update.refresh_masters()

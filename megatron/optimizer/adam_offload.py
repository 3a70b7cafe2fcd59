"""AdamW with its state in host memory or in a file.

Gradients are copied from the device while it still computes. The flat tensors are updated one after the other; the new
weights of one are copied back while the next is updated. State in a file is read ahead by one flat tensor, and written
after its update.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.optimizer.adam_flat import Resident
from megatron.optimizer.decision import Decision
from megatron.state.store import FlatRun
from megatron.utils.device import HostLink
from megatron.utils.disk_tensors import DiskTensors
from megatron.utils.dtype import HALF

DIRECTORY_FLAG = "--optimizer-offload-directory"


class Offloaded(Resident):
    """Keeps and updates the state on the host."""

    loads_in_place = False  # the file's layout differs from a checkpoint's, and an accelerator needs a copy anyway
    device = torch.device("cpu")

    def __init__(
        self,
        store: TrainingStore,
        runs: Sequence[FlatRun],
        *,
        directory: Path | None = None,
        link: HostLink | None = None,
    ) -> None:
        """`directory`: holds the file with the state; None keeps it in memory. `link`: transfers to the device; None if
        the weights are on the host."""
        self.runs, self._store, self._link = runs, store, link
        dtype = torch.float64 if any(run.grads.dtype == torch.float64 for run in runs) else torch.float32
        lengths = [len(_kinds(run)) * run.weights.numel() for run in runs]
        self._tensors: list[Tensor] = []
        self._file: DiskTensors | None = None
        if directory is None:
            self._tensors = [torch.zeros(length, dtype=dtype) for length in lengths]
        else:
            self._file = DiskTensors(directory, lengths, setting=DIRECTORY_FLAG, dtype=dtype)
        # host copies of each flat tensor's weights and gradients, if these are on a device
        self._copies: list[tuple[Tensor, Tensor]] = []
        if link is not None:
            for run in runs:
                weights, grads = (link.empty(tensor.numel(), tensor.dtype) for tensor in (run.weights, run.grads))
                self._copies.append((weights, grads))
        self._arrivals: list[Callable[[], None]] = []
        for run in self._sweep(changes=True, refreshed=True, returned=False):
            if "master" in run.kinds:
                run.kinds["master"].copy_(run.weights)

    def start(self, decision: Decision) -> Decision | None:
        self._arrivals = []
        if self._link is not None:
            for run, (_, grads) in zip(self.runs, self._copies, strict=True):
                self._arrivals.append(self._link.to_host(run.grads, grads))
        decided = decision.on_host()
        if decided.applied:
            return decided
        self._arrivals = []
        return None

    def sweep(self, *, changes: bool = True, refreshed: bool = False) -> Iterator[FlatRun]:
        return self._sweep(changes, refreshed, returned=changes)

    def _sweep(self, changes: bool, refreshed: bool, returned: bool) -> Iterator[FlatRun]:
        arrivals, self._arrivals = self._arrivals, []
        for number, state in self._states(changes):
            run, weights = self.runs[number], self._weights(number)
            if refreshed and weights is not run.weights:
                weights.copy_(run.weights)
            if arrivals:
                arrivals[number]()
            kinds = _kinds(run)
            parts = state.view(len(kinds), run.weights.numel()).unbind()
            yield FlatRun(run.names, run.ends, self._grads(number), weights, dict(zip(kinds, parts, strict=True)))
            if self._link is not None and returned:
                self._link.to_device(weights, run.weights)
        if self._link is not None and returned:
            self._link.join()

    def _states(self, changes: bool) -> Iterator[tuple[int, Tensor]]:
        """Yields the number of each flat tensor and its state as one tensor. The tensor is a copy if the state is in a
        file and `changes` is False."""
        if self._file is None:
            yield from enumerate(self._tensors)
            return
        for number, state in self._file.sweep(changes=changes):
            yield number, state if changes else state.clone()

    def _weights(self, number: int) -> Tensor:
        return self.runs[number].weights if self._link is None else self._copies[number][0]

    def _grads(self, number: int) -> Tensor:
        """Gradients of a flat tensor on the host. Shards on the host have new gradient tensors in each step."""
        run = self.runs[number]
        if self._link is not None:
            return self._copies[number][1]
        return run.grads if self._store.flat else self._store.grad(run.names[0]).view(-1)


def _kinds(run: FlatRun) -> tuple[str, ...]:
    """Kinds of state that a flat tensor has."""
    return ("exp_avg", "exp_avg_sq", "master") if run.weights.dtype in HALF else ("exp_avg", "exp_avg_sq")


def share_of(runs: Sequence[FlatRun], fraction: float) -> int:
    """Number of leading `runs` whose elements come closest to `fraction` of all elements; at least 1 unless `fraction`
    is 0."""
    sizes = [0, *accumulate(run.weights.numel() for run in runs)]
    closest = min(range(len(sizes)), key=lambda count: abs(sizes[count] - fraction * sizes[-1]))
    return min(max(closest, 1), len(runs)) if fraction > 0.0 else closest

"""Gradients of a data-parallel model, in a few flat buffers that are summed once per step.

    grads = GradBuffers(model.named_parameters(), state.dp)
    grads.zero()
    for batch in micro_batches:
        if last: grads.arm()          # with overlap: reduce each bucket as soon as its last gradient is there
        loss(batch).backward()
    grads.reduce()                    # a SUM over the ranks: the loss decides what it is divided by

A hook on every parameter moves its gradient into the buffer, so backward stays what torch does. Half-precision
gradients are added up in fp32. On one rank a parameter in the gradients' type needs no buffer: its gradient stays in
`parameter.grad`, and the step is the plain single-process one.

A parameter that got no gradient counts as having a gradient of zero, on every rank and in every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.model.wgrads import AddToParameter
from megatron.ops.wgrad import Accumulate

DEFAULT_BUCKET_SIZE = 40_000_000
"""Elements of a bucket: few messages without overlap, and small enough that the first starts early with it."""

_SCRATCH_SIZE = 1 << 20
"""Elements widened at a time when a half gradient is added to fp32: stays in the cache, three times faster."""


@dataclass
class _Slot:
    """The place of one parameter's gradient."""

    name: str
    parameter: nn.Parameter
    axis: Axis
    """The axis that its gradient is summed over."""
    view: torch.Tensor | None = None
    """Its part of the bucket; None where the gradient stays in `parameter.grad`."""
    bucket: int = -1
    filled: bool = False
    """Whether the view holds a gradient of this step (before that it may hold anything)."""


@dataclass
class _Bucket:
    """One flat buffer. Its parameters are in reverse order, which is the order of backward."""

    slots: list[_Slot]
    buffer: torch.Tensor
    axis: Axis
    arrived: set[str] = field(default_factory=set)
    launched: bool = False
    pending: collectives.Pending | None = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.slots)


class GradBuffers:
    """The gradients of `params`, summed over the data-parallel axis by `reduce()`."""

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        dp: Axis,
        *,
        axes: Mapping[str, Axis] | None = None,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        overlap: bool = False,
        flat: bool = False,
        accumulate: Accumulate | None = None,
    ) -> None:
        """`axes`: for parameters whose gradients are summed over another axis than `dp`, such as experts. `flat`: every
        gradient is in a buffer, even where `parameter.grad` would do. `accumulate`: multiplies into a buffer."""
        self.dp = dp
        self.overlap = overlap and dp.size > 1
        self.flat = flat
        self._accumulate = accumulate
        self._axes = dict(axes or {})
        self._slots: dict[str, _Slot] = {}
        self._names_of_tied: dict[str, str] = {}
        self._collect(params)
        self._slot_of = {id(slot.parameter): slot for slot in self._slots.values()}
        self._buckets = self._make_buckets(bucket_size)
        self._armed = False
        self._reduced = False
        self._next_bucket = 0
        self._scratch: torch.Tensor | None = None
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot))
            for slot in self._slots.values()
            if slot.view is not None
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Every trainable parameter once, in the order given; a tied one under its first name."""
        return tuple(self._slots)

    def parameter(self, name: str) -> nn.Parameter:
        return self._slot(name).parameter

    def grad_dtype(self, name: str) -> torch.dtype:
        """The type in which the gradient is added up."""
        return self._dtype_for(self.parameter(name))

    def grad(self, name: str) -> torch.Tensor:
        """The gradient in its accumulation type: a view of the buffer, so writing to it changes the gradient."""
        slot = self._slot(name)
        if slot.view is None:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            return slot.parameter.grad
        if not slot.filled:
            self._fill_with_zeros(slot)
        return slot.view

    def grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All gradients by name."""
        return ((name, self.grad(name)) for name in self._slots)

    def flat_buffers(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Each buffer with the names of the parameters whose gradients lie in it, one after the other."""
        return (([slot.name for slot in bucket.slots], bucket.buffer) for bucket in self._buckets)

    def zero(self) -> None:
        """Begins a step. No memory is touched: the first gradient overwrites what is in the buffer."""
        for slot in self._slots.values():
            slot.filled = False
            slot.parameter.grad = None
        for bucket in self._buckets:
            assert bucket.pending is None, "zero() while a reduction is in flight: call reduce() first"
            bucket.launched = False
            bucket.arrived.clear()
        self._armed = self._reduced = False
        self._next_bucket = 0

    @torch.no_grad()
    def fill_with_zeros(self) -> None:
        """After `zero()`, for gradients that are only ever added: every buffer counts as filled."""
        for bucket in self._buckets:
            bucket.buffer.zero_()
        for slot in self._slots.values():
            assert slot.view is not None, f"the gradient of {slot.name} has no place in a buffer"
            slot.filled = True
            slot.parameter.grad = slot.view if slot.parameter.dtype == slot.view.dtype else None

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the gradient grad.t() @ x, given as its two factors instead of by backward."""
        slot = self._slot_of.get(id(parameter))
        view = None if slot is None else slot.view
        if slot is None or view is None:
            AddToParameter().put(parameter, grad, x)
            return
        self._check_open(slot)
        if self._accumulate is None or not self._accumulate(view, grad, x, slot.filled):
            self._take(slot, view, grad.t() @ x)
        if parameter.dtype == view.dtype:
            parameter.grad = view
        self._arrived(slot)

    def arm(self) -> None:
        """Announces the last backward of the step: from now on a complete bucket may be reduced."""
        self._armed = True

    def reduce(self) -> None:
        """Sums the remaining buckets over the ranks and waits for all of them. Once per step."""
        assert not self._reduced, "reduce() twice in one step would sum the sums: call zero() first"
        self._reduced = True
        for name in self._slots:
            self.grad(name)  # zeros where nothing arrived
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None

    @torch.no_grad()
    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient by `factor`, a single number."""
        for bucket in self._buckets:
            bucket.buffer.mul_(factor)
        for slot in self._slots.values():
            if slot.view is None and slot.parameter.grad is not None:
                slot.parameter.grad.mul_(factor)

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _slot(self, name: str) -> _Slot:
        return self._slots[self._names_of_tied.get(name, name)]

    def _collect(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        first_name: dict[int, str] = {}
        for name, parameter in params:
            if not parameter.requires_grad:
                continue
            known = first_name.setdefault(id(parameter), name)
            if known != name:
                self._names_of_tied[name] = known
                continue
            assert name not in self._slots, f"two parameters are called {name}"
            self._slots[name] = _Slot(name, parameter, self._axes.get(name, self.dp))

    def _dtype_for(self, parameter: nn.Parameter) -> torch.dtype:
        return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype

    def _make_buckets(self, bucket_size: int) -> list[_Bucket]:
        """Cuts the parameters, last first, into buffers of `bucket_size` elements or more, by type, device, axis."""
        assert bucket_size > 0, f"bucket size {bucket_size}"
        buckets: list[_Bucket] = []
        open_buckets: dict[tuple[torch.dtype, torch.device, str], list[_Slot]] = {}
        for slot in reversed(self._slots.values()):
            dtype = self._dtype_for(slot.parameter)
            if slot.axis.size == 1 and dtype == slot.parameter.dtype and not self.flat:
                continue
            members = open_buckets.setdefault((dtype, slot.parameter.device, slot.axis.name), [])
            members.append(slot)
            if sum(member.parameter.numel() for member in members) >= bucket_size:
                buckets.append(_make_bucket(len(buckets), members, dtype))
                members.clear()
        for (dtype, *_), members in open_buckets.items():
            if members:
                buckets.append(_make_bucket(len(buckets), members, dtype))
        return buckets

    @torch.no_grad()
    def _on_gradient(self, slot: _Slot, parameter: nn.Parameter) -> None:
        """Runs after backward has added to `parameter.grad`: moves it into the buffer."""
        grad, view = parameter.grad, slot.view
        assert grad is not None and view is not None
        self._check_open(slot)
        if grad.is_sparse:
            grad = grad.to_dense()
        if parameter.dtype == view.dtype:
            if grad.data_ptr() != view.data_ptr():  # the first of the step, or backward made a new tensor
                view.copy_(grad)
            parameter.grad = view
        else:
            self._take(slot, view, grad)
            parameter.grad = None
        self._arrived(slot)

    def _check_open(self, slot: _Slot) -> None:
        if self._buckets[slot.bucket].launched or self._reduced:
            raise RuntimeError(
                f"a gradient of {slot.name} arrived after its sum over the ranks had begun: call zero() at the start "
                "of a step, arm() only before its last backward, and reduce() after it"
            )

    def _take(self, slot: _Slot, view: torch.Tensor, grad: torch.Tensor) -> None:
        """Copies or adds to the buffer, in its type."""
        if not slot.filled:
            view.copy_(grad)
        elif view.device.type != "cpu" or not grad.is_contiguous():
            view.add_(grad)
        else:
            if self._scratch is None or self._scratch.dtype != view.dtype:
                self._scratch = torch.empty(_SCRATCH_SIZE, dtype=view.dtype)
            for into, part in zip(view.view(-1).split(_SCRATCH_SIZE), grad.view(-1).split(_SCRATCH_SIZE), strict=True):
                into.add_(self._scratch[: part.numel()].copy_(part))

    def _arrived(self, slot: _Slot) -> None:
        slot.filled = True
        if self._armed and self.overlap:
            self._buckets[slot.bucket].arrived.add(slot.name)
            while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].complete:
                self._launch_next()

    def _launch_next(self) -> None:
        """Reduces buckets in the same order on every rank, whatever the order of backward: collectives must match."""
        bucket = self._buckets[self._next_bucket]
        self._next_bucket += 1
        bucket.launched = True
        bucket.pending = collectives.start_all_reduce(bucket.buffer, bucket.axis)

    def _fill_with_zeros(self, slot: _Slot) -> None:
        assert slot.view is not None
        slot.view.zero_()
        slot.filled = True
        if slot.parameter.dtype == slot.view.dtype:
            slot.parameter.grad = slot.view


def _make_bucket(index: int, members: list[_Slot], dtype: torch.dtype) -> _Bucket:
    sizes = [slot.parameter.numel() for slot in members]
    buffer = torch.zeros(sum(sizes), dtype=dtype, device=members[0].parameter.device)
    for slot, part in zip(members, buffer.split(sizes), strict=True):
        slot.view = part.view(slot.parameter.shape)
        slot.bucket = index
    return _Bucket(list(members), buffer, members[0].axis)


@torch.no_grad()
def broadcast_parameters(tensors: Iterable[tuple[str, torch.Tensor]], dp: Axis) -> None:
    """Copies the first rank's values to the other ranks of the axis; for models that each rank initialised."""
    if dp.size == 1:
        return
    for _, tensor in tensors:
        whole = tensor.data.contiguous()
        collectives.broadcast(whole, dp)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(whole)

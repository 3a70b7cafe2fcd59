"""Store for weights that every data-parallel rank holds whole. Gradients are in buckets, which are summed once per
step.

    store = BucketStore(model.named_parameters(), state.dp)
    store.zero()
    for batch in micro_batches:
        if last: store.arm()          # with overlap: reduce each bucket as soon as its last gradient arrives
        loss(batch).backward()
    store.reduce()                    # a SUM over the ranks: the loss decides what to divide by

A hook on every parameter moves its gradient into the buffer during torch's backward pass. By default, half-precision
gradients are accumulated in fp32. On a single rank, a parameter whose gradients are accumulated in its own dtype needs
no buffer: its gradient stays in `parameter.grad`.

A parameter without a gradient counts as having a zero gradient, on every rank and in every layout.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.data_parallel.buckets import GradientSlot, make_buckets
from megatron.data_parallel.late_gather import LateGather
from megatron.data_parallel.training_store import TrainingStore
from megatron.distributed.parallel_state import Axis
from megatron.model.wgrads import AddToParameter
from megatron.ops.wgrad import Accumulate
from megatron.state.store import FlatRun
from megatron.utils.dtype import HALF

DEFAULT_BUCKET_SIZE = 40_000_000
"""Default number of elements in a bucket: large, so that messages are few; but with overlap, the first message must
start early."""
_PER_RANK = 1_000_000
"""Least number of elements of a bucket per rank: a ring sends these in one message, which must outweigh its latency."""
_SCRATCH_SIZE = 1 << 20
"""Number of elements converted to fp32 at a time when a half-precision gradient is added to an fp32 one. They fit in
the CPU's cache, which is three times faster."""


def bucket_size(given: int | None, members: int) -> int:
    """Number of elements in a bucket that `members` ranks sum: the given number, or the default."""
    return given or max(DEFAULT_BUCKET_SIZE, _PER_RANK * members)


class BucketStore(TrainingStore):
    """Weights and gradients of `params`; `reduce()` sums the gradients over the data-parallel axis."""

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        dp: Axis,
        *,
        axes: Mapping[str, Axis] | None = None,
        replicas: Axis | None = None,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        overlap: bool = False,
        flat: bool = False,
        divided: bool = False,
        apart: Collection[str] = (),
        in_own_type: bool = False,
        late_gather: nn.Module | None = None,
        accumulate: Accumulate | None = None,
        counts_lacking: bool = False,
    ) -> None:
        """Registers hooks on `params`, whose gradients are summed over `dp` in few large messages.

        - `axes`: parameter name -> axis to sum over, for parameters (such as experts) that use another axis than `dp`.
        - `replicas`: with `divided`, second axis to sum over: the ranks that update the same chunk in the instances of
          the optimizer.
        - `apart`: names of parameters that get a bucket of their own, so that all stages with a copy divide it in the
          same way.
        - `flat`: keep every gradient in a buffer, even where `parameter.grad` would be enough.
        - `divided` (ZeRO-1): each rank receives only the sum of its chunk of every buffer, and updates only these
          weights.
        - `in_own_type`: accumulate gradients in their parameter's dtype, half precision included.
        - `accumulate`: a matrix product that adds its result to a buffer.
        - `late_gather`: a model whose next forward pass overlaps the all-gather of its divided weights.
        - `counts_lacking`: each bucket's message also counts the ranks that lack one of the bucket's gradients.
        """
        replicas = replicas or Axis.single("replicate")
        self.overlap = overlap and dp.size * replicas.size > 1
        self.flat = flat
        self._accumulate = accumulate
        self._slots: dict[str, GradientSlot] = {}
        self._slot_of: dict[int, GradientSlot] = {}
        self._names_of_tied: dict[str, str] = {}
        for name, parameter, axis in ((name, p, (axes or {}).get(name, dp)) for name, p in params if p.requires_grad):
            dtype = accumulation_dtype(parameter, in_own_type)
            self._collect(GradientSlot(name, parameter, axis, replicas, dtype, dtype == parameter.dtype, name in apart))
        in_buffers = (slot for slot in reversed(self._slots.values()) if flat or not slot.fits_its_parameter)
        assert not (counts_lacking and replicas.size > 1), "counts_lacking needs a single instance of the optimizer"
        self._buckets = make_buckets(in_buffers, bucket_size, divided, counts_lacking)
        self.names = tuple(self._slots)
        self.device = next((slot.parameter.device for slot in self._slots.values()), torch.device("cpu"))
        slots = {**self._slots, **{name: self._slots[first] for name, first in self._names_of_tied.items()}}
        self.axes = {name: slot.axis for name, slot in slots.items()}
        self.divisions = {name: slot.division for name, slot in slots.items()}
        self.grad_dtypes = {name: slot.dtype for name, slot in slots.items()}
        self._lacking: list[str] = []
        self._armed = self._reduced = False
        self._next_bucket = 0
        self._adder = Adder()
        self._gathers_late = late_gather is not None
        self._hooks = self._listen(late_gather)

    def _collect(self, slot: GradientSlot) -> None:
        known = self._slot_of.setdefault(id(slot.parameter), slot)
        if known is not slot:
            self._names_of_tied[slot.name] = known.name
            return
        assert slot.name not in self._slots, f"two parameters are called {slot.name}"
        self._slots[slot.name] = slot

    def _listen(self, late_gather: nn.Module | None) -> list[RemovableHandle]:
        """Registers the hooks that collect gradients and wait for late weights."""
        in_buffers = [slot for slot in self._slots.values() if slot.view is not None]
        hooks = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot)) for slot in in_buffers
        ]
        if late_gather is not None:
            hooks += LateGather(late_gather, [bucket for bucket in self._buckets if bucket.divided]).hooks
        return hooks

    def _slot(self, name: str) -> GradientSlot:
        return self._slots[self._names_of_tied.get(name, name)]

    def parameter(self, name: str) -> nn.Parameter:
        return self._slot(name).parameter

    def weight(self, name: str) -> Tensor:
        slot = self._slot(name)
        if slot.division is None:
            return slot.parameter
        bucket = self._buckets[slot.bucket]
        return bucket.flatten_weights()[slice(*bucket.piece(slot.name))]

    def grad(self, name: str) -> Tensor:
        """Gradient in its accumulation dtype: a view of the buffer, so writing to it changes the gradient."""
        slot = self._slot(name)
        if slot.view is None:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            return slot.parameter.grad
        if not slot.filled:
            self._fill_with_zeros(slot)
        assert slot.own is not None
        return slot.own

    def runs(self) -> list[FlatRun]:
        """Returns one `FlatRun` per bucket, with this rank's gradients and weights. The weights become views of a flat
        tensor."""
        assert self.flat, "some gradients are not in buffers; make the store with flat=True"
        return [bucket.run for bucket in self._buckets]

    def flat_grads(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((next(iter(bucket.places)), bucket.own) for bucket in self._buckets)
        yield from ((name, self.grad(name)) for name, slot in self._slots.items() if slot.view is None)

    def multiply(self, factor: Tensor | float) -> None:
        for bucket in self._buckets:
            bucket.own.mul_(factor)
        for slot in self._slots.values():
            if slot.view is None and slot.parameter.grad is not None:
                slot.parameter.grad.detach().mul_(factor)

    def whole_of(self, name: str, part: Tensor) -> Tensor:
        slot = self._slot(name)
        return part if slot.division is None else self._buckets[slot.bucket].whole_of(slot.name, part)

    def zero(self) -> None:
        """Begins a step. No memory is written: the first gradient overwrites the buffer."""
        for slot in self._slots.values():
            slot.filled = False
            slot.parameter.grad = None
        for bucket in self._buckets:
            assert bucket.pending is None, "zero() while a reduction is in flight: call reduce() first"
            bucket.launched = False
            bucket.arrived.clear()
        self._armed = self._reduced = False
        self._next_bucket = 0
        self._lacking = []

    @torch.no_grad()
    def fill_with_zeros(self) -> None:
        """Zeros every buffer and marks it as filled, for code that adds to every gradient. Call it after `zero()`."""
        for bucket in self._buckets:
            bucket.buffer.zero_()
        for slot in self._slots.values():
            assert slot.view is not None, f"the gradient of {slot.name} has no place in a buffer"
            slot.filled = True
            slot.parameter.grad = slot.view if slot.shown else None

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Adds the gradient grad.t() @ x of a parameter. A layer passes these two factors instead of letting autograd
        multiply them."""
        slot = self._slot_of.get(id(parameter))
        view = None if slot is None else slot.view
        if slot is None or view is None:
            AddToParameter().put(parameter, grad, x)
            return
        self._check_open(slot)
        if self._accumulate is None or not self._accumulate(view, grad, x, slot.filled):
            self._take(slot, view, grad.t() @ x)
        if slot.shown:
            parameter.grad = view
        self._arrived(slot)

    def arm(self) -> None:
        """Announces the last backward of the step: complete buckets may be reduced from now on."""
        self._armed = True

    def reduce(self) -> None:
        """Sums the remaining buckets over the ranks and waits for all of them. Call it once per step."""
        self._start_reduce()
        self._finish_reduce()

    def _start_reduce(self) -> None:
        """Starts the remaining sums, in the same order on every rank."""
        assert not self._reduced, "reduce() was called twice in one step; call zero() first"
        self.wait_for_weights()  # the forward pass has not waited for weights that it did not use
        self._reduced = True
        for name, slot in self._slots.items():
            if slot.view is None:
                self.grad(name)  # zeros where nothing arrived
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        if self._buckets:
            self._buckets[-1].start_sum_of_instances()

    def _finish_reduce(self) -> None:
        for bucket in self._buckets:
            bucket.finish_sum()

    def publish(self) -> None:
        """All-gathers the divided weights, in the order in which the next forward pass needs them."""
        self.wait_for_weights()
        for bucket in reversed(self._buckets):
            if bucket.divided:
                bucket.start_gather()
        if not self._gathers_late:
            self.wait_for_weights()

    def wait_for_weights(self) -> None:
        for bucket in reversed(self._buckets):
            bucket.finish_gather()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, slot: GradientSlot, parameter: nn.Parameter) -> None:
        """Moves a gradient into the buffer after backward has added it to `parameter.grad`."""
        grad, view = self._grad_that_came(slot), slot.view
        assert view is not None
        self._check_open(slot)
        if grad.requires_grad:  # backward ran with create_graph
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        if slot.shown:
            if grad.data_ptr() != view.data_ptr():  # the step's first gradient, or backward made a new tensor
                view.copy_(grad)
            parameter.grad = view
        else:
            self._take(slot, view, grad)
            parameter.grad = self._stand_in(slot)
        self._arrived(slot)

    def _grad_that_came(self, slot: GradientSlot) -> Tensor:
        assert slot.parameter.grad is not None
        return slot.parameter.grad

    def _stand_in(self, slot: GradientSlot) -> Tensor | None:
        """Value of `parameter.grad` between passes, for a gradient whose buffer `parameter.grad` does not show."""
        del slot
        return None

    def _check_open(self, slot: GradientSlot) -> None:
        assert self._buckets[slot.bucket].gathering is None, f"{slot.name}: got a gradient during its all-gather"
        if self._buckets[slot.bucket].launched or self._reduced:
            raise RuntimeError(
                f"a gradient of {slot.name} arrived after its sum over the ranks had begun. Call zero() at the start "
                "of a step, arm() only before its last backward, and reduce() after it"
            )

    def _take(self, slot: GradientSlot, view: Tensor, grad: Tensor) -> None:
        """Copies or adds a gradient to the buffer, in the buffer's dtype."""
        if slot.filled:
            self._adder.add(view, grad)
        else:
            view.copy_(grad)

    def _arrived(self, slot: GradientSlot) -> None:
        slot.filled = True
        if self._armed and self.overlap:
            self._buckets[slot.bucket].arrived.add(slot.name)
            for bucket in self._buckets[self._next_bucket :]:
                if len(bucket.arrived) < len(bucket.places):
                    break
                self._launch_next()

    def _launch_next(self) -> None:
        """Reduces the next bucket, then starts the previous bucket's sum over the instances of the optimizer. That sum
        needs the previous bucket's sum within the instance, which has had time to complete. All ranks reduce the
        buckets in the same order, because collectives must match."""
        bucket = self._buckets[self._next_bucket]
        lacking = [name for name in bucket.places if not self._slots[name].filled]
        for name in lacking:
            self._fill_with_zeros(self._slots[name])
            self._lacking.append(name)
        bucket.start_sum(bool(lacking))
        if self._next_bucket:
            self._buckets[self._next_bucket - 1].start_sum_of_instances()
        self._next_bucket += 1

    def _fill_with_zeros(self, slot: GradientSlot) -> None:
        assert slot.view is not None
        slot.view.zero_()
        slot.filled = True
        if slot.shown:
            slot.parameter.grad = slot.view


def accumulation_dtype(parameter: nn.Parameter, own: bool = False) -> torch.dtype:
    """Dtype in which gradients are accumulated: fp32 for a parameter in half precision, unless `own` is set; otherwise
    the parameter's dtype."""
    halved = parameter.dtype in HALF
    return torch.float32 if halved and not own else parameter.dtype


class Adder:
    """Adds a gradient to a sum, in the sum's dtype. A CPU converts the gradient in parts that fit in its cache."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def add(self, into: Tensor, grad: Tensor) -> None:
        if into.device.type != "cpu" or grad.dtype == into.dtype or not (into.is_contiguous() and grad.is_contiguous()):
            into.add_(grad)
            return
        if self._scratch is None or self._scratch.dtype != into.dtype:
            self._scratch = torch.empty(_SCRATCH_SIZE, dtype=into.dtype)
        for some, part in zip(into.view(-1).split(_SCRATCH_SIZE), grad.view(-1).split(_SCRATCH_SIZE), strict=True):
            some.add_(self._scratch[: part.numel()].copy_(part))

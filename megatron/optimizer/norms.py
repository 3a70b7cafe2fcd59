"""Norms and counts over many tensors. Results are tensors; functions that need a host sync document it.

`torch.linalg.vector_norm` accumulates a large fp32 tensor in fp32: for 40 million elements it was 0.3 % too small. This
module cuts tensors into rows of `_ROW` elements, and accumulates the norms of the rows in double precision. The error
is 3e-9 at the same speed. The native kernel accumulates in double precision throughout.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.ops import Kernels
from megatron.state.shard import Shard, copied_parts, counted_parts
from megatron.utils.device_kind import kind_of

_ROW = 4096

SplitOver = tuple[Axis, ...]
"""Axes that a tensor is split over; its norm is summed over them. () means that every rank holds the whole tensor."""
SquareSum = Callable[[Sequence[Tensor]], Tensor]
"""Sum of squares of tensors on one device, in double precision. It is not finite if and only if an element is not."""


def square_sum_for(kernels: Kernels | None, asynchronous: bool) -> SquareSum:
    if kernels is not None and kernels.grad_norm is not None:
        return partial(flat_sum_of_squares, kernels.grad_norm)
    return sum_of_wide_squares if asynchronous else sum_of_squares


def sum_on_device(square_sum: SquareSum, device: torch.device, tensors: Sequence[Tensor]) -> Tensor:
    """Sums squares of tensors on this device or on the host; the result is on the device."""
    memories = dict.fromkeys(tensor.device for tensor in tensors)
    if list(memories) == [device]:
        return square_sum(tensors)
    sums = [square_sum([tensor for tensor in tensors if tensor.device == memory]) for memory in memories]
    return torch.stack([value.to(device) for value in sums]).sum() if sums else square_sum(tensors)


def row_norms(tensor: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Norms of pieces of `_ROW` elements of a tensor. The norm of these norms is the tensor's norm. Each piece is short
    enough to be accurate in its dtype."""
    if dtype is None and tensor.dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    flat = tensor.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    parts = []
    if whole:
        parts.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype))
    if whole < flat.numel():
        parts.append(torch.linalg.vector_norm(flat[whole:], dtype=dtype).view(1))
    return parts


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sums the squares of row norms computed in the tensors' own dtype. Reads the result: a host sync."""
    if _alone_and_small(tensors):
        return _small_norm(tensors[0]).square()
    parts = [part for tensor in tensors for part in row_norms(tensor)]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    total = torch.cat(parts).to(widest(parts[0].device)).square().sum()
    if not torch.isfinite(total) and all(torch.isfinite(tensor).all() for tensor in tensors):
        return torch.stack([tensor.cpu().double().square().sum() for tensor in tensors]).sum()  # fp32 rows overflowed
    return total


def _alone_and_small(tensors: Sequence[Tensor]) -> bool:
    """True for one small tensor, whose norm costs less than the overhead of the general path."""
    return len(tensors) == 1 and tensors[0].numel() <= _ROW


def _small_norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=widest(tensor.device))


def sum_of_wide_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sums squares in double precision throughout. It cannot overflow for fp32, so it needs no host sync."""
    parts = [part for tensor in tensors for part in row_norms(tensor, torch.float64)]
    return torch.cat(parts).square().sum() if parts else torch.zeros((), dtype=torch.float64)


def flat_sum_of_squares(kernel: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Sums squares with the native kernel; adjacent tensors of one buffer share a call."""
    wide = [tensor for tensor in tensors if tensor.dtype == torch.float64]
    narrow = [tensor for tensor in tensors if tensor.dtype != torch.float64]
    sums = [kernel(flat) for flat in side_by_side(narrow)]
    if wide or not sums:
        sums.append(sum_of_wide_squares(wide).to(sums[0].device if sums else _device_of(tensors)))
    return torch.stack(sums).sum()


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the elements as few flat tensors, without copying contiguous ones.

    Buffers are ordered by first appearance, not by address, so that repeated runs of training add in the same order.
    """
    runs: list[tuple[Tensor, int, int]] = []  # first tensor, begin and end of its run in the storage
    copies: list[Tensor] = []
    filled = [tensor for tensor in tensors if tensor.numel()]
    place: dict[int, int] = {}  # buffer address -> position
    for tensor in filled:
        place.setdefault(tensor.untyped_storage().data_ptr(), len(place))
    for tensor in sorted(filled, key=lambda t: (place[t.untyped_storage().data_ptr()], int(t.storage_offset()))):
        start = int(tensor.storage_offset())
        if not tensor.is_contiguous():
            copies.append(tensor.reshape(-1))
        elif runs and runs[-1][2] == start and _share_storage(runs[-1][0], tensor):
            runs[-1] = (*runs[-1][:2], start + tensor.numel())
        else:
            runs.append((tensor, start, start + tensor.numel()))
    return [first.as_strided((stop - start,), (1,), start) for first, start, stop in runs] + copies


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _device_in(groups: Mapping[SplitOver, Sequence[Tensor]]) -> torch.device:
    return _device_of([tensor for tensors in groups.values() for tensor in tensors])


def widest(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on accelerators without double precision."""
    return torch.float64 if kind_of(device.type).double else torch.float32


def count_zeros(tensors: Sequence[Tensor]) -> Tensor:
    counts = [tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)


def global_norm(
    groups: Mapping[SplitOver, Sequence[Tensor]],
    copies: Mapping[SplitOver, Sequence[Tensor]] | None = None,
    *,
    square_sum: SquareSum = sum_of_squares,
    device: torch.device | None = None,
) -> Tensor:
    """L2 norm over all tensors of the model; each element counts once. Another rank counts the elements in `copies`;
    here they only make the norm non-finite if one of them is. `device`: of the sums; default: the tensors' device."""
    squares = {axes: square_sum(tensors) for axes, tensors in groups.items()}
    for axes, tensors in (copies or {}).items():
        if tensors:
            squares[axes] = squares[axes] + 0.0 * square_sum(tensors)
    return add_over_axes(squares, device or _device_in(groups)).sqrt()


def norm_on_host(
    groups: Mapping[SplitOver, Sequence[Tensor]], norm: Callable[[Mapping[SplitOver, Sequence[Tensor]]], Tensor]
) -> float:
    """Returns `norm(groups)` as a number: a host sync."""
    whole = groups.get((), ()) if len(groups) == 1 else ()
    return (_small_norm(whole[0]) if _alone_and_small(whole) else norm(groups)).item()


def global_zeros(groups: Mapping[SplitOver, Sequence[Tensor]], device: torch.device | None = None) -> Tensor:
    """Number of elements that are exactly zero. `device`: see `global_norm`."""
    device = device or _device_in(groups)
    counts = {axes: count_zeros(tensors) for axes, tensors in groups.items()}
    return add_over_axes({axes: counts[axes].to(device) if groups[axes] else counts[axes] for axes in counts}, device)


def add_over_axes(values: Mapping[SplitOver, Tensor], device: torch.device) -> Tensor:
    """Sum of one number per group, each first summed over the group's axes."""
    dtype = widest(device)
    sums = []
    for axes, value in values.items():
        # A rank without tensors of a group has a zero on the host. Copying it to the device would be a host sync.
        box = value.to(dtype) if value.device == device else torch.zeros((), dtype=dtype, device=device)
        if axes:
            box = box.clone()
        for axis in axes:
            collectives.all_reduce(box.view(1), axis)
        sums.append(box)
    return sum(sums[1:], sums[0]) if sums else torch.zeros((), dtype=dtype, device=device)


@dataclass(frozen=True)
class _Place:
    """Counting rule for one parameter's elements."""

    spec: Shard | None
    """Shard that selects the elements to count; None counts all."""
    group: int
    """Index of the group of parameters that are split and divided over the same axes."""


class CountedParts:
    """Groups named tensors by the axes that their parameters are split and divided over."""

    def __init__(
        self,
        grads: TrainingStore,
        split_over: Mapping[str, SplitOver],
        shards: Mapping[str, Shard],
        axes: Sequence[SplitOver],
    ) -> None:
        """`shards`: every rank counts all elements of a parameter that is not in it. `axes`: groups to return even if
        empty."""
        numbers = {over: number for number, over in enumerate(dict.fromkeys(axes))}
        self._places: dict[str, _Place] = {}
        for name in grads.names:  # once, not in every step: small steps have as many parameters as large ones
            divided = grads.divided_over(name)
            own = (divided,) if divided.size > 1 else ()
            group = numbers.setdefault((*split_over.get(name, ()), *own), len(numbers))
            self._places[name] = _Place(shards.get(name), group)
        self._axes = tuple(numbers)

    def __call__(self, tensors: Iterable[tuple[str, Tensor]], counted: bool = True) -> dict[SplitOver, list[Tensor]]:
        """Elements that this rank counts or, unless `counted`, those that another rank counts."""
        groups: list[list[Tensor]] = [[] for _ in self._axes]
        for name, tensor in tensors:
            place = self._places[name]
            if place.spec is None:
                parts = [tensor] if counted else []
            else:
                parts = counted_parts(place.spec, tensor) if counted else copied_parts(place.spec, tensor)
            groups[place.group].extend(parts)
        return dict(zip(self._axes, groups, strict=True))

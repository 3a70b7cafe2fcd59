"""Comparison of a kernel with its oracle in fp64: every output and gradient, twice, on memory full of NaN."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.ops.operation import DTYPES
from megatron.ops.proof.rounding import Near, half_ulp, near
from megatron.ops.registry import OPERATIONS


@dataclass(frozen=True)
class Draw:
    """Random tensors of one dtype on the CPU."""

    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int, spread: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * spread).to(dtype or self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def with_specials(self, *shape: int) -> Tensor:
        """Random numbers. Every thirteenth is inf, -inf, NaN, a zero, or the largest or smallest of the dtype."""
        info = torch.finfo(self.dtype)
        values = [math.inf, -math.inf, math.nan, 0.0, -0.0, info.max, info.min, info.tiny, info.smallest_normal / 4]
        flat = self(*shape).flatten()
        places = flat[::13]
        places.copy_(torch.tensor(values, dtype=torch.float64).repeat(len(places) // len(values) + 1)[: len(places)])
        return flat.view(shape)


@dataclass(frozen=True)
class Call:
    """A test call. `args`: the oracle's arguments. `grads`: positions to differentiate by (None: all floating)."""

    name: str
    args: tuple[Any, ...]
    grads: tuple[int, ...] | None = None


Bounds = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Sequence[Near], Mapping[int, Near]]]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Verification of a kernel. `kernel(torch.ops.<namespace>)` and `oracle` have the same signature and return one or
    several tensors.

    A kernel that works in place is wrapped: it works on copies and returns them.
    """

    name: str
    folder: str  # the folder of csrc/
    kernel: Callable[[Any], Callable[..., Any]]
    oracle: Callable[..., Any]
    # (a call's arguments, incoming gradients) -> rounding bounds of each output, and of each argument's gradient by
    # position.
    bounds: Bounds
    calls: Callable[[Draw], Iterator[Call]]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    operation: str = ""  # the operation that runs this kernel (default: the one of this name)
    products: bool = False  # runs torch's matrix products between kernels that have separate proofs


def proof_of(name: str, calls: Callable[[Draw], Iterator[Call]], bounds: Bounds, **given: Any) -> Proof:
    """Makes the proof of an operation's kernel against its formula. `given` overrides fields."""
    operation = OPERATIONS[name]
    assert operation.native is not None
    usual: dict[str, Any] = {
        "folder": operation.native.folder,
        "kernel": operation.native.bound,
        "oracle": operation.formula,
        "dtypes": operation.native.dtypes,
    }
    return Proof(name=name, calls=calls, bounds=bounds, **(usual | given))


@dataclass(frozen=True)
class Finding:
    """Result for one tensor of one call. `error`: the largest error of an element before rounding to the dtype, divided
    by its bound. `wrong`: description of a wrong result."""

    tensor: str
    error: float
    wrong: str | None = None


def flat_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in flat_tensors(part)] if isinstance(value, list | tuple) else []


def compare_call(proof: Proof, call: Call, ops: Any, device: str) -> list[Finding]:
    """Compares the kernel's outputs and gradients for one call with fp64."""
    upstreams = _upstreams(proof, call)
    exact = _outcome(proof.oracle, call, upstreams, "cpu", torch.float64)
    plain = _outcome(proof.oracle, call, upstreams, "cpu")
    kernel = proof.kernel(ops)
    with poisoned_memory():
        first = _outcome(kernel, call, upstreams, device)
        second = _outcome(kernel, call, upstreams, device)
    if not len(first) == len(second) == len(exact) == len(plain):
        return [Finding("results", math.inf, f"{len(first)} tensors where the oracle has {len(exact)}")]
    names = _names(len(upstreams), call)
    return [_compare(*parts) for parts in zip(names, first, second, exact, plain, bounds_of(proof, call, upstreams))]


def bounds_of(proof: Proof, call: Call, upstreams: Sequence[Tensor]) -> list[Near]:
    """Bounds of the outputs, then of the gradients."""
    with torch.no_grad():
        outputs, gradients = proof.bounds(call.args, upstreams)
    return [*outputs, *(gradients[i] for i in _differentiated(call))]


def _names(outputs: int, call: Call) -> list[str]:
    return [f"output {i}" for i in range(outputs)] + [f"gradient of argument {i}" for i in _differentiated(call)]


def _differentiated(call: Call) -> tuple[int, ...]:
    if call.grads is not None:
        return call.grads
    return tuple(i for i, arg in enumerate(call.args) if isinstance(arg, Tensor) and arg.is_floating_point())


def _upstreams(proof: Proof, call: Call) -> list[Tensor]:
    """Draws a gradient for every output."""
    with torch.no_grad():
        outputs = flat_tensors(proof.oracle(*call.args))
    generator = torch.Generator().manual_seed(len(call.name))
    return [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]


def _outcome(
    function: Callable[..., Any], call: Call, upstreams: Sequence[Tensor], device: str, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Runs a call with its floating-point tensors cast to `dtype`. Returns outputs, then gradients, on the CPU."""
    chosen = _differentiated(call)
    args = [_placed(arg, device, dtype).requires_grad_(i in chosen) if isinstance(arg, Tensor) else arg
            for i, arg in enumerate(call.args)]  # fmt: skip
    before = [arg.detach().clone() for arg in args if isinstance(arg, Tensor)]
    outputs = flat_tensors(function(*args))
    gradients: Sequence[Tensor] = ()
    if chosen:
        given = [upstream.to(device, output.dtype) for upstream, output in zip(upstreams, outputs)]
        gradients = torch.autograd.grad(outputs, [args[i] for i in chosen], given)
    after = [arg for arg in args if isinstance(arg, Tensor)]
    assert all(same_bits(old, new.detach()) for old, new in zip(before, after)), f"{call.name}: an argument was changed"
    return [tensor.detach().cpu() for tensor in (*outputs, *gradients)]


def _placed(tensor: Tensor, device: str, dtype: torch.dtype | None) -> Tensor:
    """Copies a tensor with its strides and its offset within a pack, so that misalignment is kept."""
    begin = tensor.storage_offset() % 16
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    memory = torch.empty(begin + span, dtype=tensor.dtype, device=device)
    copy = memory.as_strided(tensor.shape, tensor.stride(), begin).copy_(tensor)
    return copy.to(dtype) if dtype is not None and tensor.is_floating_point() else copy


def _compare(name: str, ours: Tensor, again: Tensor, exact: Tensor, plain: Tensor, bound: Near) -> Finding:
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return Finding(name, math.inf, f"{ours.dtype} {tuple(ours.shape)}, not {plain.dtype} {plain.shape}")
    if not same_bits(ours, again):
        return Finding(name, math.inf, "a second run gave other bits")
    assert bound.error.shape == exact.shape, f"{name}: {tuple(bound.error.shape)} bounds for {tuple(exact.shape)}"
    # The interval of allowed results, rounded to the dtype, including overflow and subnormal numbers. For inf and NaN,
    # which have no bound, no error is allowed.
    error = bound.error.nan_to_num(0.0, 0.0)
    low, high = ((exact + sign * error).to(ours.dtype) for sign in (-1, 1))
    right = (low <= ours) & (ours <= high)
    # Two forms of one formula may give inf and NaN for the same gradient, but not a finite number and inf or NaN.
    kind = torch.isfinite if name.startswith("gradient") else _kind
    same = (kind(ours) == kind(plain)) | (kind(ours) == kind(exact.to(ours.dtype)))
    right |= ~ours.isfinite() & same
    if not right.all():
        place = int(right.logical_not().flatten().nonzero()[0])
        values = [float(tensor.flatten()[place]) for tensor in (ours, exact, low, high, plain)]
        got, right_value, least, most, formula = (f"{value:.9g}" for value in values)
        given = f"the kernel gives {got}, fp64 gives {right_value}, and the formula gives {formula}"
        return Finding(name, math.inf, f"error at {place}: {given}; allowed are {least} to {most}")
    used = (ours.double() - exact).abs() - (half_ulp(near(ours), ours.dtype) if ours.dtype in DTYPES else 0.0)
    share = (used / error)[ours.isfinite() & (error > 0)]
    return Finding(name, max(0.0, float(share.max())) if share.numel() else 0.0)


def _kind(tensor: Tensor) -> Tensor:
    """Classifies numbers: 0 finite, 1 inf, 2 -inf, 3 NaN."""
    return tensor.isposinf() + 2 * tensor.isneginf() + 3 * tensor.isnan()


def same_bits(one: Tensor, other: Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view = integers[one.element_size()]
    return one.shape == other.shape and torch.equal(one.contiguous().view(view), other.contiguous().view(view))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills new tensors with NaN, which reveals elements that a kernel does not write."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]

"""How a kernel is compared with its oracle in fp64: every output and every gradient, on memory full of NaN, twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from megatron.ops.operation import DTYPES
from megatron.ops.registry import OPERATIONS

# How far an output may be from fp64 (relative Frobenius norm); halves must also be as near as the plain formula is.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
AS_NEAR_AS_REF = 1.1


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
        """Every thirteenth number is one of inf, -inf, NaN, zeros, and the largest and smallest of the dtype."""
        info = torch.finfo(self.dtype)
        values = [math.inf, -math.inf, math.nan, 0.0, -0.0, info.max, info.min, info.tiny, info.smallest_normal / 4]
        flat = self(*shape).flatten()
        places = flat[::13]
        places.copy_(torch.tensor(values, dtype=torch.float64).repeat(len(places) // len(values) + 1)[: len(places)])
        return flat.view(shape)


@dataclass(frozen=True)
class Call:
    """`args` as the oracle takes them; `grads`: the positions of those to differentiate by (None: all floating)."""

    name: str
    args: tuple[Any, ...]
    grads: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How a kernel is verified. `kernel`, given torch.ops.<namespace>, and `oracle` have one signature and return a
    tensor or several.

    A kernel that changes its arguments in place is wrapped to work on copies and to return them.
    """

    name: str
    folder: str  # the folder of csrc/
    kernel: Callable[[Any], Callable[..., Any]]
    oracle: Callable[..., Any]
    calls: Callable[[Draw], Iterator[Call]]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    limits: dict[torch.dtype, float] = field(default_factory=dict)  # where they differ from LIMITS
    as_near_as_ref: float = AS_NEAR_AS_REF  # how many times the plain formula's error an error in halves may be


def proof_of(name: str, calls: Callable[[Draw], Iterator[Call]], **given: Any) -> Proof:
    """The proof of an operation's kernel against its formula; `given` replaces either."""
    operation = OPERATIONS[name]
    assert operation.native is not None
    usual: dict[str, Any] = {
        "folder": operation.native.folder,
        "kernel": operation.native.bound,
        "oracle": operation.formula,
    }
    return Proof(name=name, calls=calls, **(usual | given))


@dataclass(frozen=True)
class Finding:
    """One tensor of one call: `wrong` is None or says what is wrong with it."""

    tensor: str
    error: float
    wrong: str | None = None


def flat_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in flat_tensors(part)] if isinstance(value, list | tuple) else []


def check(proof: Proof, call: Call, ops: Any, device: str) -> list[Finding]:
    """The kernel's outputs and gradients for one call, each against fp64."""
    dtype = next((a.dtype for a in call.args if isinstance(a, Tensor) and a.is_floating_point()), torch.float32)
    upstreams = _upstreams(proof, call)
    exact = _outcome(proof.oracle, call, upstreams, "cpu", torch.float64)
    plain = _outcome(proof.oracle, call, upstreams, "cpu")
    kernel = proof.kernel(ops)
    with poisoned_memory():
        first = _outcome(kernel, call, upstreams, device)
        second = _outcome(kernel, call, upstreams, device)
    if not len(first) == len(second) == len(exact) == len(plain):
        return [Finding("results", math.inf, f"{len(first)} tensors where the oracle has {len(exact)}")]
    # A tensor may be coarser than the call: gradients of parameters in half precision.
    allowed = LIMITS | proof.limits
    limits = [max(allowed[dtype], allowed.get(tensor.dtype, 0.0)) for tensor in plain]
    names = _names(len(upstreams), call)
    results = zip(names, first, second, exact, plain, limits, repeat(proof.as_near_as_ref))
    return [_compare(*parts) for parts in results]


def _names(outputs: int, call: Call) -> list[str]:
    return [f"output {i}" for i in range(outputs)] + [f"gradient of argument {i}" for i in _differentiated(call)]


def _differentiated(call: Call) -> tuple[int, ...]:
    if call.grads is not None:
        return call.grads
    return tuple(i for i, arg in enumerate(call.args) if isinstance(arg, Tensor) and arg.is_floating_point())


def _upstreams(proof: Proof, call: Call) -> list[Tensor]:
    """A gradient for every output, with numbers of every size."""
    with torch.no_grad():
        outputs = flat_tensors(proof.oracle(*call.args))
    generator = torch.Generator().manual_seed(len(call.name))
    return [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]


def _outcome(
    function: Callable[..., Any],
    call: Call,
    upstreams: Sequence[Tensor],
    device: str,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Outputs, then gradients, of a call on a device, its floating-point tensors cast to `dtype`; on the CPU."""
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
    """A copy that keeps the strides and where in a pack it begins: what is not contiguous or aligned stays so."""
    begin = tensor.storage_offset() % 16
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    memory = torch.empty(begin + span, dtype=tensor.dtype, device=device)
    copy = memory.as_strided(tensor.shape, tensor.stride(), begin).copy_(tensor)
    return copy.to(dtype) if dtype is not None and tensor.is_floating_point() else copy


def _compare(
    name: str, ours: Tensor, again: Tensor, exact: Tensor, plain: Tensor, limit: float, as_near: float
) -> Finding:
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return Finding(name, math.inf, f"{ours.dtype} {tuple(ours.shape)}, not {plain.dtype} {plain.shape}")
    if not same_bits(ours, again):
        return Finding(name, math.inf, "a second run gave other bits")
    # Which of inf and NaN a gradient has depends on how its formula is written; that it is not finite does not.
    kind = torch.isfinite if name.startswith("gradient") else _kind
    strange = (kind(ours) != kind(plain)) & (kind(ours) != kind(exact.to(ours.dtype)))
    if strange.any():
        place = int(strange.flatten().nonzero()[0])
        values = [float(tensor.flatten()[place]) for tensor in (ours, plain, exact)]
        return Finding(name, math.inf, "at {}: {} where the formula gives {} and fp64 {}".format(place, *values))
    finite = exact.isfinite() & plain.isfinite() & ours.isfinite()
    error, error_of_plain = (_relative(tensor[finite], exact[finite]) for tensor in (ours, plain))
    limit = _limit(ours.dtype, limit, as_near, error_of_plain, int(finite.sum()))
    return Finding(name, error, None if error <= limit else f"error {error:.2e}, {limit:.2e} is allowed")


def _limit(dtype: torch.dtype, limit: float, as_near: float, error_of_plain: float, numbers: int) -> float:
    """fp32 may miss the limit where the plain formula does; halves must meet it and be as near as that formula.

    Of few numbers some may be rounded otherwise by chance: the fewer they are, the more is granted.
    """
    chance = 1 / math.sqrt(max(1, numbers))
    if dtype not in (torch.bfloat16, torch.float16):
        return max(limit, as_near * error_of_plain)
    # What is rounded twice, as RMSNorm is, may be a whole unit off in each of a few numbers.
    return max(min(limit, (as_near + 2 * chance) * error_of_plain), torch.finfo(dtype).eps * min(1.0, 2 * chance))


def _kind(tensor: Tensor) -> Tensor:
    """0 finite, 1 inf, 2 -inf, 3 NaN."""
    return tensor.isposinf() + 2 * tensor.isneginf() + 3 * tensor.isnan()


def _relative(tensor: Tensor, exact: Tensor) -> float:
    # Scaled before it is squared: the largest numbers of a dtype are among them.
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    difference = float(((tensor.double() - exact) / (scale or 1.0)).norm())
    size = float((exact / (scale or 1.0)).norm())
    return difference / size if size else difference


def same_bits(one: Tensor, other: Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view = integers[one.element_size()]
    return one.shape == other.shape and torch.equal(one.contiguous().view(view), other.contiguous().view(view))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN: what a kernel does not write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]

"""Selects the implementation of every operation: `--kernels auto|native|ref[,-op...]`.

The selection is resolved once, passed to constructors and printed as a table. It never changes the computed function.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.ops import attention as attention_op
from megatron.ops import wgrad
from megatron.ops.library import Library, library, this_gpu
from megatron.ops.operation import (
    Fallbacks,
    Implementation,
    Native,
    Operation,
    Target,
    kernel_name,
    on_stderr,
    with_fallback,
)
from megatron.ops.registry import OPERATIONS
from megatron.ops.verification import user_cache, verified
from megatron.utils.device_kind import kind_of


@dataclass(frozen=True)
class Choice:
    op: str
    backend: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations that a model is built from. Their formulas are in the modules of this package.

    The fields declare the operations' signatures for the type checker, and their order in the table. An operation
    without a field is still an attribute, and comes last in the table.
    """

    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gelu: Callable[[Tensor, bool], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    geglu: Callable[[Tensor, bool], Tensor]
    squared_relu: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias_dropout_add: Callable[[Tensor, Tensor | None, Tensor, Callable[[Tensor], Tensor]], Tensor]
    softmax: Callable[[Tensor, Tensor | None, float, bool], Tensor]
    attention: Callable[..., Tensor]
    packed_attention: Callable[..., Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    taken: Callable[..., Tensor]
    weighted_sum: Callable[..., Tensor]
    # For the optimizer; None leaves it to torch's own functions. See megatron/ops/optim.py.
    adamw: Callable[..., None] | None = None
    grad_norm: Callable[[Tensor], Tensor] | None = None
    # For data parallelism's buffers; None leaves weight gradients to backward. See megatron/ops/wgrad.py.
    wgrad_accumulation: wgrad.Accumulate | None = None
    others: Mapping[str, Callable[..., Any] | None] = field(default_factory=dict)
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    note: str | None = field(default=None, compare=False)

    def __getattr__(self, name: str) -> Any:
        others = vars(self).get("others", {})  # missing while a copy is being made
        if name not in others:
            raise AttributeError(f"there is no operation {name!r}")
        return others[name]

    def backend(self, op: str) -> str:
        return next(choice.backend for choice in self.choices if choice.op == op)

    def table(self) -> str:
        """Returns one line per operation (name, backend, reason), and then the note, if there is one."""
        rows = [("op", "backend", "reason"), *((c.op, c.backend, c.reason) for c in self.choices)]
        op_width, backend_width = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{op:<{op_width}}  {backend:<{backend_width}}  {why}" for op, backend, why in rows]
        return "\n".join(lines if self.note is None else [*lines, self.note])

    def summary(self) -> str:
        """Returns one line with the operations that do not run on the kernels of csrc/."""
        others = ", ".join(f"{choice.op} ({choice.backend})" for choice in self.choices if choice.backend != "native")
        any_native = any(choice.backend.startswith("native") for choice in self.choices)
        line = f"kernels: native{f' except {others}' if others else ''}" if any_native else "kernels: no native kernels"
        return f"{line}; --log-kernels lists all, with reasons"


def _ordered() -> list[Operation]:
    places = [item.name for item in fields(Kernels)]
    return sorted(OPERATIONS.values(), key=lambda one: places.index(one.name) if one.name in places else len(places))


OPS: tuple[str, ...] = tuple(operation.name for operation in _ordered())


def resolve(
    spec: str,
    device_type: str,
    *,
    attention: str = "auto",
    native: Library | None = None,
    warn: Callable[[str], None] = on_stderr,
) -> Kernels:
    """Selects implementations by `--kernels` and `--attention-backend` (flash, fused: SDPA; unfused, local: ref).

    `warn` prints, once per reason, why `auto` runs another implementation than the table shows.
    """
    mode, excluded = _parse(spec)
    native = library() if native is None else native
    target = Target(device_type, attention)
    why_not = why_not_native(native, device_type)
    if mode == "native" and why_not is not None:
        raise ConfigError(
            f"--kernels {spec}: the native kernels are {why_not}; to run without them, use --kernels auto"
        )
    fallbacks = None if mode == "native" else Fallbacks(warn)
    chosen = {
        one.name: Implementation("ref", one.formula, "excluded by --kernels")
        if one.name in excluded
        else _choose(one, mode, target, native, why_not, fallbacks)
        for one in _ordered()
    }
    functions: dict[str, Any] = {name: implementation.function for name, implementation in chosen.items()}
    if functions["attention"] is attention_op.attention:
        functions["attention"] = partial(attention_op.attention, softmax_op=functions["softmax"])
    typed = {item.name for item in fields(Kernels)} & functions.keys()
    return Kernels(
        **{name: functions.pop(name) for name in typed},
        others=functions,
        choices=tuple(Choice(name, picked.backend, picked.reason) for name, picked in chosen.items()),
        note=None if native.missing is None or mode == "ref" else f"the native kernels are {native.missing}",
    )


def _choose(
    op: Operation, mode: str, target: Target, native: Library, why_not: str | None, fallbacks: Fallbacks | None
) -> Implementation:
    if mode == "ref":
        return Implementation("ref", op.formula, "--kernels ref")
    if (required := op.required(target)) is not None:
        return required
    portable = op.without_native(target)
    if op.native is None or (op.native.cpu_only and target.kind.verified_kernels):
        return portable
    doubts = _doubts(op, op.native, native) if target.kind.verified_kernels else {}
    # The optimizer's kernels have no fallback function here, so they run in all dtypes or not at all.
    if why_not is None and mode == "auto" and (len(doubts) == len(op.native.dtypes) or not portable.function):
        why_not = next(iter(doubts.values()), None)
    if why_not is not None:
        # A missing library is reported once, under the table.
        return portable if native.missing else replace(portable, reason=f"{portable.reason}; native is {why_not}")
    left_out = {} if mode == "native" else doubts
    function = op.native.bound(native.ops)
    if portable.function is not None:
        function = with_fallback(op.name, op.native, function, portable.function, fallbacks, left_out)
    reason = ", ".join(["csrc", *(f"{_short(dtype)} {why}" for dtype, why in doubts.items())])
    backend = f"native, {portable.backend} in {' and '.join(map(_short, left_out))}" if left_out else "native"
    return Implementation(backend, function, f"{reason}{op.native.note(target)}")


def _doubts(op: Operation, kernels: Native, native: Library) -> dict[torch.dtype, str]:
    """Returns the dtypes in which this operation's CUDA kernels are not known to be correct, with the reason."""
    whys = {dtype: native.unverified.get(kernel_name(op.name, dtype)) for dtype in kernels.dtypes}
    return {dtype: why for dtype, why in whys.items() if why is not None}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def left_to_compiler(kernels: Kernels) -> list[str]:
    """Returns the operations with native kernels whose formulas run in a compiled layer."""
    native = (OPERATIONS[choice.op] for choice in kernels.choices if choice.backend.startswith("native"))
    return [op.name for op in native if op.native is not None and op.native.left_to_compiler]


def usable_library(spec: str, device: torch.device, say: Callable[[str], None], cache: Path | None = None) -> Library:
    """Returns the kernels of this installation. Under `auto`, unverified GPU kernels are verified first. The
    outcome is stored in `cache` (default: the user's cache folder)."""
    native = library()
    on_gpu = kind_of(device.type).verified_kernels and this_gpu() is not None  # a dry run needs no GPU
    if not on_gpu or _parse(spec)[0] != "auto" or why_not_native(native, device.type) is not None:
        return native
    return verified(native, device, say, cache=user_cache() if cache is None else cache)


def slower_without_kernels(spec: str) -> list[str]:
    """Returns one line with the reason why the kernels cannot be loaded and the command that builds them. Returns no
    line if they can be loaded, or under `--kernels ref`."""
    if spec.split(",")[0] == "ref" or (missing := library().missing) is None:
        return []
    return [f"native kernels are {missing} (PyTorch's own operations run instead, which is slower)"]


def why_not_native(native: Library, device_type: str) -> str | None:
    """Returns the reason why the kernels do not run on this device type, or None."""
    if native.missing is not None:
        return native.missing
    kind = kind_of(device_type)
    if kind.verified_kernels and native.without_cuda is not None:
        return f"built without CUDA ({native.without_cuda})"
    if kind.verified_kernels and (reason := native.why_not_on(this_gpu())) is not None:
        return reason
    return None if kind.native_kernels else f"not made for the device {device_type}"


def _parse(spec: str) -> tuple[str, frozenset[str]]:
    mode, *rest = (part.strip() for part in spec.split(","))
    if mode not in ("auto", "native", "ref"):
        raise ConfigError(f"--kernels {spec}: {mode!r} is not one of auto, native, ref")
    for part in rest:
        if not part.startswith("-"):
            raise ConfigError(f"--kernels {spec}: after {mode} only exclusions such as -rope may follow, not {part!r}")
        if part[1:] not in OPS:
            near = difflib.get_close_matches(part[1:], OPS, n=1)
            hint = f"did you mean -{near[0]}? " if near else ""
            raise ConfigError(f"--kernels {spec}: no operation {part[1:]!r}; {hint}the operations are {', '.join(OPS)}")
    return mode, frozenset(part[1:] for part in rest)

"""Description of an operation for the selection: its implementations and the arguments that they accept."""

import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.utils.device_kind import DeviceKind, kind_of
from megatron.utils.log import print_line

Function = Callable[..., Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_name(op: str, dtype: torch.dtype) -> str:
    """Name of an operation's kernels for one dtype, such as "gelu float32". The kernels of each dtype are verified and
    used separately."""
    return f"{op} {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Target:
    """Device and settings for which implementations are selected."""

    device_type: str
    attention: str = "auto"  # --attention-backend

    @property
    def kind(self) -> DeviceKind:
        return kind_of(self.device_type)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. The table of kernels shows its backend and the reason of the selection."""

    backend: str
    function: Function | None  # None: the caller uses PyTorch's functions
    reason: str


Portable = Callable[[Target], Implementation]
"""Selects the implementation that runs without the kernels of csrc/."""


@dataclass(frozen=True)
class Native:
    """The kernels of csrc/ for an operation."""

    folder: str  # the folder of csrc/
    function: Function  # (torch.ops.<namespace>, the formula's arguments)
    # The arguments of a call -> why the kernels do not support them and what they need; None if they are supported.
    unsupported: Callable[..., str | None]
    cpu_only: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    # True: torch.compile uses the formula, which it can fuse with its neighbours, unlike a separate kernel.
    left_to_compiler: bool = True
    # The arguments of a call -> True if the fallback was measured to be faster; `auto` then uses it.
    slower: Callable[..., bool] = lambda *args, **named: False
    # Text for the table of kernels: when the fallback runs, or why it is not used where it is faster.
    note: Callable[[Target], str] = lambda target: ""

    def bound(self, ops: Any) -> Function:
        """Returns a function with the formula's signature. `ops` is torch.ops.<namespace>."""
        # Not a `partial`: copying a model would copy its arguments, and `ops` cannot be copied.
        return lambda *args, **named: self.function(ops, *args, **named)


@dataclass(frozen=True)
class Operation:
    """An operation and its implementations.

    - `formula`: the fallback for every call, and the reference for other implementations. None if models do not use
      the operation.
    - `portable`: selects the implementation that runs without the kernels of csrc/. None selects the formula.
    - `required`: returns an implementation that a setting other than --kernels demands, or None.
    """

    name: str  # spelling in --kernels, and attribute of `Kernels`
    formula: Function | None
    portable: Portable | None = None
    native: Native | None = None
    required: Callable[[Target], Implementation | None] = lambda target: None

    def without_native(self, target: Target) -> Implementation:
        if self.portable is None:
            return Implementation("ref", self.formula, "no faster implementation exists")
        return self.portable(target)


def torch_function(function: Function) -> Portable:
    return lambda target: Implementation("torch", function, "PyTorch's own fused function")


# ---------------------------------------------------------------- what kernels can take


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def unsupported_floats(*tensors: Tensor | None) -> str | None:
    """Returns the reason why no kernel can read these tensors, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{described(tensor)}: the kernel needs float32, bfloat16 or float16"
    return unsupported_devices(*tensors)


def unsupported_devices(*tensors: Tensor | None) -> str | None:
    """Returns an error for tensors on several devices: a wrong address in a kernel would crash the process."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    return (
        f"tensors of {' and '.join(sorted(map(str, devices)))}: the kernel needs one device"
        if len(devices) > 1
        else None
    )


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return 1 <= len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


# ---------------------------------------------------------------- falling back


def on_stderr(text: str) -> None:
    print_line(f"warning: {text}", sys.stderr)


@dataclass(frozen=True)
class Fallbacks:
    """Warns why a fallback runs, once per reason over all operations."""

    warn: Callable[[str], None] = on_stderr
    said: set[str] = field(default_factory=set)

    def say(self, op: str, reason: str) -> None:
        kind = re.sub(r" \(.*?\)", "", reason)  # without the shapes
        if kind not in self.said:
            self.said.add(kind)
            self.warn(f"{op}: native kernels do not support {kind}; a fallback runs for all such calls")


def with_fallback(
    name: str,
    native: Native,
    kernel: Function,
    fallback: Function,
    fallbacks: Fallbacks | None,
    left_out: Collection[torch.dtype] = (),
) -> Function:
    """Returns a function that calls the kernel if it supports the arguments, else the fallback. Without `fallbacks`
    (--kernels native) it raises for unsupported arguments. Calls in the dtypes `left_out` always use the fallback."""

    def call(*args: Any, **named: Any) -> Any:
        if left_out and args[0].dtype in left_out:
            return fallback(*args, **named)
        if native.left_to_compiler and torch.compiler.is_compiling():
            return fallback(*args, **named)
        if fallbacks is not None and native.slower(*args, **named):
            return fallback(*args, **named)
        reason = native.unsupported(*args, **named)
        if reason is None:
            return kernel(*args, **named)
        if fallbacks is None:
            raise ConfigError(f"--kernels native: {name} does not support {reason}; use --kernels auto")
        fallbacks.say(name, reason)
        return fallback(*args, **named)

    return call


# ---------------------------------------------------------------- registration with torch


def register_shapes(namespace: str, **results: Function) -> None:
    """Registers fake kernels: for each operation, a function of its arguments that returns empty results."""
    for name, result in results.items():
        torch.library.register_fake(f"{namespace}::{name}", result)


def without_derivative(namespace: str, *names: str) -> None:
    """Makes differentiating these operations an error. PyTorch would only warn and treat the derivative as zero."""
    for name in names:
        torch.library.register_autograd(f"{namespace}::{name}", partial(_refuse, name))


def _refuse(name: str, ctx: Any, *grads: Any) -> NoReturn:
    raise ConfigError(f"{name}: this native kernel has no derivative; use --kernels ref")

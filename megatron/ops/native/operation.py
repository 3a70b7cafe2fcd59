"""What an operation with kernels of its own consists of, and how a call chooses between them and the fallback."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def unsupported_floats(*tensors: Tensor | None) -> str | None:
    """Why the kernels cannot read these: what holds for every operation."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{described(tensor)}: float32, bfloat16 or float16 would do"
    return unsupported_devices(*tensors)


def unsupported_devices(*tensors: Tensor | None) -> str | None:
    """A kernel that was given an address of another device would end the process."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    return f"tensors of {' and '.join(sorted(map(str, devices)))}: one device would do" if len(devices) > 1 else None


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return 1 <= len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def never(*args: Any, **named: Any) -> bool:
    return False


def on_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Fallbacks:
    """Says why a fallback runs: once for each reason, whichever operation meets it first."""

    warn: Callable[[str], None] = on_stderr
    said: set[str] = field(default_factory=set)

    def say(self, op: str, reason: str) -> None:
        kind = re.sub(r" \(.*?\)", "", reason)  # of whatever shape
        if kind not in self.said:
            self.said.add(kind)
            self.warn(f"{op}: native kernels cannot take {kind}; here, and where this comes again, a fallback runs")


@dataclass(frozen=True)
class Operation:
    name: str  # as in Kernels
    source: str  # csrc/cuda/<source>.cu; "" for what the CPU alone has
    make: Callable[[Any], Callable[..., Any]]  # given torch.ops.<namespace>: a function with the signature of ref's
    unsupported: Callable[..., str | None]  # given a call's arguments: why the kernel cannot take them, and what it can
    # Under torch.compile the plain formula is fused with its neighbours, which a kernel of its own cannot be.
    left_to_compiler: bool = True
    # Calls that the fallback was measured to do faster: `auto` leaves them to it.
    beaten: Callable[..., bool] = never
    note: str = ""  # for the table: when the fallback runs, or why it does not though it is faster

    def with_fallback(
        self, ops: Any, fallback: Callable[..., Any], fallbacks: Fallbacks | None = None
    ) -> Callable[..., Any]:
        """The kernel where it can do the call; elsewhere the fallback, which is said. None may not fall back."""
        fast, strict = self.make(ops), fallbacks is None

        def call(*args: Any, **named: Any) -> Any:
            if self.left_to_compiler and torch.compiler.is_compiling():
                return fallback(*args, **named)
            if not strict and self.beaten(*args, **named):
                return fallback(*args, **named)
            reason = self.unsupported(*args, **named)
            if reason is None:
                return fast(*args, **named)
            if fallbacks is None:
                raise ConfigError(f"--kernels native: {self.name} cannot take {reason}; or use --kernels auto")
            fallbacks.say(self.name, reason)
            return fallback(*args, **named)

        return call

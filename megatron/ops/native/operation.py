"""What an operation with kernels of its own consists of, and how a call chooses between them and the fallback."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_tensors(*args: Any, **named: Any) -> str | None:
    """Why the kernels cannot take these arguments: what holds for every operation."""
    for value in (*args, *named.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in DTYPES:
            return (
                f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}: float32, bfloat16 or float16 would do"
            )
    return None


def never(*args: Any, **named: Any) -> bool:
    return False


@dataclass(frozen=True)
class Operation:
    name: str  # as in Kernels
    source: str  # csrc/cuda/<source>.cu
    make: Callable[[Any], Callable[..., Any]]  # given torch.ops.<namespace>: a function with the signature of ref's
    unsupported: Callable[..., str | None] = unsupported_tensors
    # Under torch.compile the plain formula is fused with its neighbours, which a kernel of its own cannot be.
    left_to_compiler: bool = True
    # Calls that the fallback was measured to do faster: `auto` leaves them to it, and `note` says so in the table.
    beaten: Callable[..., bool] = never
    note: str = ""

    def with_fallback(self, ops: Any, fallback: Callable[..., Any], *, strict: bool) -> Callable[..., Any]:
        """The kernel where it can do the call; elsewhere an error (`strict`) or the fallback, said once."""
        fast, said = self.make(ops), set[str]()

        def call(*args: Any, **named: Any) -> Any:
            if self.left_to_compiler and torch.compiler.is_compiling():
                return fallback(*args, **named)
            if not strict and self.beaten(*args, **named):
                return fallback(*args, **named)
            reason = self.unsupported(*args, **named)
            if reason is None:
                return fast(*args, **named)
            if strict:
                raise ConfigError(f"--kernels native: {self.name} cannot take {reason}; or use --kernels auto")
            kind = re.sub(r" \(.*?\)", "", reason)  # of whatever shape
            if kind not in said:
                said.add(kind)
                warnings.warn(f"{self.name}: the native kernel cannot take {kind}; the fallback runs", stacklevel=2)
            return fallback(*args, **named)

        return call

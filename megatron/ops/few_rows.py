"""x @ weight.T + bias for a few rows of x, without a derivative, for generation on a CPU.

Reading the weight dominates the cost of one row. The kernel reads at memory bandwidth and takes half to two thirds of
the time of MKL and oneDNN. A row's result does not depend on the other rows.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.operation import Native, Operation, described, register_shapes, unsupported_floats, without_derivative

FewRows = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x @ weight.T + bias: x [..., in], weight [out, in] -> [..., out]."""
    return F.linear(x, weight, bias)


def register(namespace: str) -> None:
    if not hasattr(getattr(torch.ops, namespace), "few_rows"):  # CPU only
        return
    register_shapes(namespace, few_rows=lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])))
    without_derivative(namespace, "few_rows")


def _native(ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ops.few_rows(x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous())


def _unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return f"x {described(x)} and a weight {described(weight)}: the kernel needs [..., in] and [out, in]"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"a bias {described(bias)} for a weight {described(weight)}: the kernel needs one number per row"
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            return f"x {described(x)} and a {name} {described(other)}: the kernel needs one dtype"
    return unsupported_floats(x, weight, bias)


OPERATIONS = (Operation("few_rows", few_rows, native=Native("few_rows", _native, _unsupported, cpu_only=True)),)

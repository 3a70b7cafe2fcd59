"""A weight's gradient, a matrix product, added straight into the buffer where it is summed up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

Accumulate = Callable[[Tensor, Tensor, Tensor, bool], bool]


class Wgrads(Protocol):
    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Takes a product's factors; backward itself then announces no gradient of the parameter."""


def accumulate(into: Tensor, grad: Tensor, x: Tensor, add: bool) -> bool:
    """`into` [out, in] becomes, or grows by, grad.t() @ x of grad [tokens, out] and x [tokens, in]. False, and nothing
    done, where no product can write to that type of buffer."""
    if into.dtype == grad.dtype == x.dtype:
        if add:
            into.addmm_(grad.t(), x)
        else:
            torch.mm(grad.t(), x, out=into)
        return True
    if into.dtype != torch.float32 or grad.dtype != x.dtype or not widens(into.device.type):
        return False
    if add:
        torch.addmm(into, grad.t(), x, out_dtype=torch.float32, out=into)
    else:
        torch.mm(grad.t(), x, out_dtype=torch.float32, out=into)
    return True


@cache
def widens(device_type: str) -> bool:
    """Whether this torch multiplies bf16 into fp32, and adds to what is there: found by small products whose results
    are known. The CPU's would first make fp32 copies of both factors: slower than a bf16 product added afterwards."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return False
    grad = torch.arange(256, device=device_type).view(16, 16).remainder(7).to(torch.bfloat16)
    x = torch.arange(512, device=device_type).view(16, 32).remainder(5).to(torch.bfloat16)
    exact = grad.double().t() @ x.double()
    into = torch.full((16, 32), 0.125, device=device_type)
    try:
        torch.addmm(into, grad.t(), x, out_dtype=torch.float32, out=into)
        first = torch.mm(grad.t(), x, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.equal(into.double(), exact + 0.125)) and bool(torch.equal(first.double(), exact))


def explanation(device_type: str) -> str:
    halves = "half precision too" if widens(device_type) else "half precision is widened and added afterwards"
    return f"the product adds straight into the gradient buffer; {halves}"

"""Weight gradients as matrix products that add directly to the accumulated gradient."""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.ops.operation import Implementation, Operation, Target
from megatron.utils.device_kind import kind_of

Accumulate = Callable[[Tensor, Tensor, Tensor, bool], bool]


class Wgrads(Protocol):
    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Receives the factors of the parameter's gradient, grad.t() @ x, with grad [tokens, out] and x [tokens, in].
        Autograd computes no gradient of this parameter."""


def accumulate(into: Tensor, grad: Tensor, x: Tensor, add: bool) -> bool:
    """Writes grad.t() @ x to `into` [out, in], or adds it (`add`), with grad [tokens, out] and x [tokens, in].

    Returns False, and does nothing, if torch has no such product for these dtypes."""
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
    """True if this torch has bf16 products that write and add to fp32, tested on small matrices with known results.

    On a CPU such a product copies both factors to fp32, which is slower than adding a bf16 product afterwards."""
    if not kind_of(device_type).cuda_libraries or not torch.cuda.is_available():
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


def _portable(target: Target) -> Implementation:
    halves = (
        "half precision too" if widens(target.device_type) else "half precision is converted to fp32 and then added"
    )
    return Implementation("torch", accumulate, f"the product adds straight into the gradient buffer; {halves}")


# The gradient buffers call it, not a model. It is listed because the table of kernels shows all fused operations.
OPERATIONS = (Operation("wgrad_accumulation", None, _portable),)

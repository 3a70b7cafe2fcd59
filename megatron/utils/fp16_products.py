"""Products of fp16 matrices on a CPU without instructions for them.

There torch multiplies fp16 number by number, 30 to 100 times slower than fp32. With these kernels in torch's table the
factors are widened, multiplied in fp32 and the result is rounded once. Values and results stay fp16, so a loss scale
does what it does on a GPU. docs/design/018-cpu-settings.md says why this belongs to the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""What every product of a model comes down to: linear layers, matmul and einsum, forward and backward."""
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"
"""The derivative of PyTorch's own attention, which multiplies by itself. (Its forward pass is as fast as in fp32.)"""


def has_fp16_products() -> bool:
    """Whether torch multiplies fp16 by instructions of this processor."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # built without oneDNN: then nothing is known to be fast
        return False


def set_fp16_products(has: Callable[[], bool] = has_fp16_products) -> str:
    """Multiplies fp16 matrices the fast way in this process, from now on. Returns a line for the log."""
    if has():
        return "fp16 products: by this processor's own instructions"
    if not hasattr(torch.library, "get_kernel"):
        return "fp16 products: torch's own, which are very slow on this processor; leave --fp16 out, or update torch"
    multiply_in_fp32()
    return "fp16 products: computed in fp32 and rounded: this processor has none of its own (as fast as fp32)"


@cache
def multiply_in_fp32() -> torch.library.Library:
    """Enters the kernels, which stay as long as what is returned. Products of other types go to torch's own."""
    kernels: list[tuple[str, str, Callable[..., Any]]] = [(name, name, _result) for name in _PRODUCTS]
    kernels += [(name, f"{name}.out", _into_out) for name in _PRODUCTS]
    kernels += [(name, f"{name}_", _into_first) for name in ("addmm", "baddbmm")]
    kernels.append((_ATTENTION, _ATTENTION, _result))
    table = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": that is meant
        for name, overload, kernel in kernels:
            table.impl(overload, _for_fp16(name, overload, kernel), "CPU", with_keyset=True, allow_override=True)
    return table


def _for_fp16(name: str, overload: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` for calls whose matrices are all fp16, torch's own for the others."""
    own = torch.library.get_kernel(f"aten::{overload}", "CPU")
    wide = getattr(torch.ops.aten, name).default

    def call(keys: Any, *args: Any, **named: Any) -> Any:
        tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
        # Beside fp16, attention has the statistics of its rows in fp32, and a mask.
        if all(x.dtype == torch.float16 for x in (tensors[:1] if name == _ATTENTION else tensors)):
            return kernel(wide, *args, **named)
        return own.call_boxed(keys, *args, **named)

    return call


def _result(product: Callable[..., Any], *args: Any, **named: Any) -> Any:
    result = product(*map(_widened, args), **{name: _widened(value) for name, value in named.items()})
    return result.half() if isinstance(result, Tensor) else tuple(part.half() for part in result)


def _into_out(product: Callable[..., Tensor], *args: Any, out: Tensor, **named: Any) -> Tensor:
    result = product(*map(_widened, args), **named)
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _into_first(product: Callable[..., Tensor], first: Tensor, *args: Any, **named: Any) -> Tensor:
    return first.copy_(product(*map(_widened, (first, *args)), **named))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value

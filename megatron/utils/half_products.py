"""Products of half-precision matrices on a CPU without instructions for them.

On such a CPU torch multiplies fp16 number by number, 30 to 100 times slower than fp32, and bf16 at a quarter of fp32's
speed. The kernels here widen the factors, multiply in fp32 and round the result once. Factors and results keep their
dtype, so a loss scale has the same effect as on a GPU. docs/design/018-cpu-settings.md explains why this belongs to the
process.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.utils.cpu import has_bf16_products

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"
"""Backward of PyTorch's own attention, which has its own matrix products. (The forward is as fast as in fp32.)"""
_SIDE = 2048
"""Number of rows and columns converted to fp32 at a time. The converted tiles take three squares of this side, for a
weight of any size. Each number of a tile is used some thousand times, so the conversion is cheap."""
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def has_fp16_products() -> bool:
    """True if torch multiplies fp16 by instructions of this processor."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # built without oneDNN: then nothing is known to be fast
        return False


def set_half_products(dtype: torch.dtype, has: Callable[[], bool] | None = None) -> str:
    """Selects the fastest products of matrices of this dtype, for the whole process. Returns a line for the log.

    By default torch or the system reports whether the processor has instructions for them; `has` replaces this test."""
    name = _NAMES[dtype]
    if has is None:
        has = has_fp16_products if dtype == torch.float16 else has_bf16_products
    if has():
        return f"{name} products: by this processor's own instructions"
    if not hasattr(torch.library, "get_kernel"):
        return f"{name} products: torch's own, slow on this processor; remove --{name}, or update torch"
    multiply_in_fp32(dtype)
    return (
        f"{name} products: computed in fp32 and rounded, because this processor has no instructions for them (about as "
        "fast as fp32)"
    )


def multiplied_in_fp32(dtype: torch.dtype) -> bool:
    """True once `multiply_in_fp32` was called for this type."""
    return dtype in _tables()


@cache
def _tables() -> dict[torch.dtype, torch.library.Library]:
    """The kernels that this process has registered; they last as long as these objects."""
    return {}


def multiply_in_fp32(dtype: torch.dtype) -> None:
    """Registers the kernels for products of this dtype. Products of other dtypes go to torch's own."""
    if multiplied_in_fp32(dtype):
        return
    products: dict[str, Callable[..., Tensor]] = {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm}
    kernels: list[tuple[str, Callable[..., Any]]] = [*products.items(), (_ATTENTION, _attention_gradients)]
    kernels += [(f"{name}.out", product) for name, product in products.items()]
    kernels += [(f"{name}_", _into_first(products[name])) for name in ("addmm", "baddbmm")]
    table = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": this is intended
        for name, kernel in kernels:
            table.impl(name, _for_type(dtype, name, kernel), "CPU", with_keyset=True, allow_override=True)
    _tables()[dtype] = table


def _for_type(dtype: torch.dtype, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `kernel` for calls whose matrices all have this dtype. Other calls go to the kernel registered so far."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(keys: Any, *args: Any, **named: Any) -> Any:
        tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
        # Beside its half-precision inputs, attention has the statistics of its rows in fp32, and a mask.
        if all(x.dtype == dtype for x in (tensors[:1] if name == _ATTENTION else tensors)):
            return kernel(*args, **named)
        return own.call_boxed(keys, *args, **named)

    return call


# ---------------------------------------------------------------- the products


def _mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _addmm(a.new_zeros(()), a, b, beta=0, out=out)


def _bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _baddbmm(a.new_zeros(()), a, b, beta=0, out=out)


def _into_first(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda first, *args, **named: product(first, *args, out=first, **named)


def _addmm(
    first: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """Computes beta * first + alpha * a @ b tile by tile; a is [m, k], b [k, n], and `first` broadcasts to [m, n]."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")
    out = _resized(out, a, (a.shape[0], b.shape[1]))
    added = first.expand(out.shape)
    for columns in _pieces(b.shape[1]):
        for rows in _pieces(a.shape[0]):
            added_here = added[:1, columns] if added.stride(0) == 0 else added[rows, columns]  # a bias stays a row
            out[rows, columns] = _tile(added_here, a[rows], b[:, columns], beta, alpha)
    return out


def _tile(added: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Computes beta * added + alpha * a @ b in fp32: a [rows, k], b [k, columns] -> [rows, columns]."""
    first, *others = _pieces(a.shape[1])
    result = torch.addmm(added.float(), a[:, first].float(), b[first].float(), beta=beta, alpha=alpha)
    for depth in others:
        result.addmm_(a[:, depth].float(), b[depth].float(), alpha=alpha)
    return result


def _baddbmm(
    first: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """Computes beta * first + alpha * a @ b for batches of matrices: a is [batch, m, k], b [batch, k, n]. Converts as
    many matrices at a time as a tile holds."""
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise RuntimeError(f"batches of matrices of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    out = _resized(out, a, (*a.shape[:2], b.shape[2]))
    added = first.expand(out.shape)
    together = _SIDE * _SIDE // max(*a.shape[1:], 1) // max(a.shape[2], b.shape[2], 1)
    if together == 0:
        for number in range(len(a)):
            _addmm(added[number], a[number], b[number], beta=beta, alpha=alpha, out=out[number])
        return out
    for start in range(0, len(a), together):
        some = slice(start, start + together)
        added_here = (added[some] if beta else added[:1, :1, :1]).float()
        out[some] = torch.baddbmm(added_here, a[some].float(), b[some].float(), beta=beta, alpha=alpha)
    return out


def _attention_gradients(*args: Any, **named: Any) -> tuple[Tensor, ...]:
    dtype = args[0].dtype
    wide = [x.float() if isinstance(x, Tensor) and x.dtype == dtype else x for x in args]
    wide_named = {name: x.float() if isinstance(x, Tensor) and x.dtype == dtype else x for name, x in named.items()}
    gradients = getattr(torch.ops.aten, _ATTENTION).default(*wide, **wide_named)
    return tuple(gradient.to(dtype) for gradient in gradients)


def _resized(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    if out is None:
        return like.new_empty(shape)
    return out if out.shape == shape else out.resize_(shape)


def _pieces(size: int) -> list[slice]:
    """Slices of one tile's length; at least one, which may be empty."""
    return [slice(start, start + _SIDE) for start in range(0, max(size, 1), _SIDE)]

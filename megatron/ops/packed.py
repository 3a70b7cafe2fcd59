"""Products with a weight packed into oneDNN's own layout, on a CPU: of many rows with a large bf16 weight in training,
and of a few rows in generation (`PackedWeight`).

With the usual layout, oneDNN repacks the weight for every block of rows. For the gradient of the head's input, packing
once costs 6 % of the product's time and saves 10 %. The logits are not packed: they would gain 5 %, but need a new
buffer in each step, which grew the process's memory by a tenth. Packing makes two copies, so the peak memory of a step
grows by up to twice the weight.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.few_rows import FewRows
from megatron.ops.operation import Target
from megatron.utils.cpu import memory_is_kept
from megatron.utils.half_products import multiplied_in_fp32

_MANY_ROWS = 2048
"""Least number of rows for which packing was measured to be faster."""
_LARGE_WEIGHT = 1 << 22
_BLOCK = 96
"""Number of rows transposed at a time, which fit in the cache."""


Product = Callable[[Tensor, Tensor], Tensor]


def selected() -> Product:
    """Returns this process's implementation of x @ weight, with x [rows, out] and weight [out, in]."""
    return times_where_it_pays if pays() else torch.matmul


def note(target: Target) -> str:
    """Text for the table of kernels."""
    if target.device_type != "cpu":
        return ""
    if pays():
        return "; large bf16 products with a weight packed by oneDNN"
    return "" if memory_is_kept() else "; no packed weights, because freed memory is not kept (--cpu-allocator)"


def pays() -> bool:
    """True if packing makes products faster in this process. This requires that freed memory is kept between steps:
    otherwise, new memory pages for the copies cost more than packing saves."""
    return memory_is_kept() and not multiplied_in_fp32(torch.bfloat16) and packs()


def times_where_it_pays(x: Tensor, weight: Tensor) -> Tensor:
    halves = x.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16
    large = x.shape[0] >= _MANY_ROWS and weight.numel() >= _LARGE_WEIGHT
    return times(x, weight) if halves and large else x @ weight


def laid_out(weight: Tensor, rows: int) -> Tensor:
    """Packs the weight for products of `rows` rows with weight.t(). Only `product` can read the result."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [rows, in] @ weight.t() for a packed weight [out, in]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def times(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight, with x [rows, out] and weight [out, in]."""
    return product(x, laid_out(transposed(weight), x.shape[0]))


def transposed(weight: Tensor) -> Tensor:
    """Returns weight.t(), contiguous. Two passes within the cache take half the time of torch's single pass."""
    rows, columns = weight.shape
    whole = rows - rows % _BLOCK
    result = weight.new_empty(columns, rows)
    blocks = weight[:whole].view(-1, _BLOCK, columns).transpose(1, 2).contiguous()
    result[:, :whole].unflatten(1, (-1, _BLOCK)).copy_(blocks.transpose(0, 1))
    result[:, whole:].copy_(weight[whole:].t())
    return result


class PackedWeight:
    """Product x @ weight.t() + bias without a derivative, for steps of generation. The kernel `few_rows`, if given,
    computes products of one row; oneDNN computes products of more rows. For up to about 16 rows, oneDNN reads its
    packed copy at memory bandwidth; torch's product of 8 rows reads at half of that."""

    def __init__(self, weight: Tensor, few_rows: FewRows | None = None, *, copied: bool = True) -> None:
        self._weight, self._few_rows = weight.detach(), few_rows
        self._copy = laid_out(self._weight, _TYPICAL_ROWS) if copied else None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Maps x [..., in] to [..., out]."""
        if self._few_rows is not None and x.numel() <= _KERNELS_ROWS * x.shape[-1]:
            return self._few_rows(x, self._weight, bias)
        if self._copy is None:
            return F.linear(x, self._weight, bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._copy, bias, "none", [], "")


_KERNELS_ROWS = 1
"""Largest number of rows for the `few_rows` kernel. With more rows it was measured to be slower, limited by
arithmetic."""
_TYPICAL_ROWS = 8


@cache
def packs(dtype: torch.dtype = torch.bfloat16) -> bool:
    """True if the packed operations exist for this dtype in this torch on this processor, and multiply correctly."""
    x, weight = (torch.arange(n, dtype=torch.float32).sin().to(dtype) for n in (40 * 64, 48 * 64))
    x, weight = x.view(40, 64), weight.view(48, 64)
    try:
        got = product(x, laid_out(weight, 40))
    except (AttributeError, RuntimeError, TypeError):  # not built, another signature, or no such type here
        return False
    close = 2**-7 if dtype == torch.bfloat16 else 1e-5
    return torch.allclose(got.double(), x.double() @ weight.double().t(), rtol=close, atol=close)

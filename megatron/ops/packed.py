"""Products of many rows with a large weight in bf16 on a CPU, the weight first laid out as the product reads it.

oneDNN lays out a weight that it meets in the usual order piece by piece, and again for every block of rows. One copy in
its own order, made before, costs 6 % of the product that gives the head's input its gradient and saves 10 %. (The
logits would gain 5 %, but need a new buffer each step, for which the heap grew by a tenth of the process.) While a
copy is made there are two: with the logits alive that is up to twice the weight more at the step's peak.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron.utils.cpu import memory_is_kept

_MANY_ROWS = 2048
"""From here on the layout is known to pay."""
_LARGE_WEIGHT = 1 << 22
_BLOCK = 96
"""Rows transposed at a time: with their columns they stay in the cache."""


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether x @ weight should go through `times`. Only in memory that is kept from step to step: the
    copies are new tensors, and touching fresh pages costs more than is gained."""
    halves = x.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16
    return halves and x.shape[0] >= _MANY_ROWS and weight.numel() >= _LARGE_WEIGHT and packs() and memory_is_kept()


def laid_out(weight: Tensor, rows: int) -> Tensor:
    """For products of `rows` rows with weight.t(): a tensor that only `product` can read."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] @ weight.t() of a weight [out, in] that is laid out."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight of x [rows, out] and weight [out, in]."""
    return product(x, laid_out(transposed(weight), x.shape[0]))


def transposed(weight: Tensor) -> Tensor:
    """weight.t(), contiguous: in two walks that stay in the cache, in half the time of torch's one that does not."""
    rows, columns = weight.shape
    whole = rows - rows % _BLOCK
    result = weight.new_empty(columns, rows)
    blocks = weight[:whole].view(-1, _BLOCK, columns).transpose(1, 2).contiguous()
    result[:, :whole].unflatten(1, (-1, _BLOCK)).copy_(blocks.transpose(0, 1))
    result[:, whole:].copy_(weight[whole:].t())
    return result


@cache
def packs() -> bool:
    """Whether this torch, on this processor, has these operations for bf16, and they multiply rightly."""
    x, weight = (torch.arange(n, dtype=torch.float32).sin().bfloat16() for n in (40 * 64, 48 * 64))
    x, weight = x.view(40, 64), weight.view(48, 64)
    try:
        got = product(x, laid_out(weight, 40))
    except (AttributeError, RuntimeError, TypeError):  # not built, another signature, or no bf16 on this processor
        return False
    return torch.allclose(got.double(), x.double() @ weight.double().t(), rtol=2**-7, atol=2**-7)

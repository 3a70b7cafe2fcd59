"""A lookup table, and the lookup in a table that is also the model's head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.utils.dtype import widened


class Table(nn.Module):
    """A lookup table with uninitialised weights, for `model.init`."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)  # [...] -> [..., width]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


def look_up_and_share(table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns F.embedding(ids, table) and the table for a tied head, with a single gradient tensor for both.

    With two separate functions, autograd would make a second gradient of the table's size, almost all zero. The head
    must return a gradient that nothing else references, because the embeddings' gradients are added to it in place.
    """
    rows, shared = _LookUpAndShare.apply(table, ids)
    return rows, shared


class _LookUpAndShare(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        ctx.set_materialize_grads(False)
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor | None, grad_table: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_rows is None:
            return grad_table, None
        if grad_table is None:
            grad_table = grad_rows.new_zeros(ctx.shape)
        (ids,) = ctx.saved_tensors
        used, place = ids.reshape(-1).unique(return_inverse=True)
        sums = widened(grad_table[used])  # [distinct ids, width]: rounded once, however often an id occurs
        sums.index_add_(0, place, widened(grad_rows.reshape(-1, ctx.shape[1])))
        return grad_table.index_copy_(0, used, sums.to(grad_table.dtype)), None

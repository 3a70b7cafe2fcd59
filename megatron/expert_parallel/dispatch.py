"""Token dispatcher: sends tokens to the ranks of their experts and back, by all-to-all without padding.

    tokens sorted by expert --ep--> rows of this rank's experts --tp--> rows of all tensor-parallel ranks --> experts
    results in the tokens' order <--ep-- results of this rank's rows <--tp-- partial sums of each rank <-- experts

Each expert's weights are split over the tensor-parallel ranks. Without sequence parallelism, these ranks hold copies of
the tokens, which enter through `copied` and leave through `summed`, once for all experts. With sequence parallelism,
the ranks hold different tokens, exchange them, and sum the partial results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis

Mapping = Callable[[Tensor, Axis], Tensor]
Run = Callable[[Tensor, list[int]], Tensor]


class ExpertDispatcher(nn.Module):
    """Sends rows to the ranks of their experts and back. Rank r of the `ep` axis owns the r-th of equal shares of the
    experts. `copied` and `summed` are the mappings of `tensor_parallel.mappings`. `split_tokens`: tensor-parallel ranks
    hold different tokens, not copies."""

    def __init__(self, ep: Axis, tp: Axis, *, split_tokens: bool, copied: Mapping, summed: Mapping) -> None:
        super().__init__()
        self.ep, self.tp, self.split_tokens = ep, tp, split_tokens
        self.copied, self.summed = copied, summed

    def forward(self, rows: Tensor, counts: Tensor, experts: Run) -> Tensor:
        """rows [choices, hidden] sorted by expert; counts [all experts] -> the experts' results in the same order."""
        everybody = torch.stack(collectives.all_gather(counts, self.ep))  # [ep, all experts]
        here = everybody.view(self.ep.size, self.ep.size, -1)[:, self.ep.rank]  # [sender, experts here]
        send, receive = counts.view(self.ep.size, -1).sum(1).tolist(), here.sum(1).tolist()
        rows = exchanged(rows, send, receive, self.ep)
        rows = self._sliced(rows, here, experts)
        return exchanged(rows, receive, send, self.ep)

    def _sliced(self, rows: Tensor, counts: Tensor, experts: Run) -> Tensor:
        """Runs this rank's slice of the experts on `rows`, sorted by sender and then by expert. `counts`: the rows per
        sender and expert, [senders, experts of this rank]."""
        if not self.split_tokens or self.tp.size == 1:
            return self.summed(_by_expert(self.copied(rows, self.tp), counts, experts), self.tp)
        everybody = torch.stack(collectives.all_gather(counts, self.tp))  # [tp, senders, experts here]
        own, each = [rows.shape[0]] * self.tp.size, everybody.sum((1, 2)).tolist()
        gathered = exchanged(rows.repeat(self.tp.size, 1), own, each, self.tp)
        parts = _by_expert(gathered, everybody.flatten(0, 1), experts)
        return exchanged(parts, each, own, self.tp).view(self.tp.size, *rows.shape).sum(0)


def _by_expert(rows: Tensor, counts: Tensor, experts: Run) -> Tensor:
    """Calls the experts on rows sorted by sender and then by expert. `counts`: the rows per sender and expert,
    [senders, experts]."""
    if counts.shape[0] == 1:
        return experts(rows, counts[0].tolist())
    numbers = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    order = numbers.repeat_interleave(counts.flatten(), output_size=rows.shape[0]).argsort(stable=True)
    results = experts(permuted(rows, order), counts.sum(0).tolist())
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return permuted(results, back)


def exchanged(rows: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
    """All-to-all of rows [sum(send), width]: the first send[0] go to member 0, the next send[1] to member 1, and so on.
    The result holds receive[i] rows from each member i, in the members' order."""
    if axis.size == 1:
        return rows
    return collectives.differentiable(
        rows,
        lambda x: collectives.exchange(x, send, receive, axis),
        lambda grad: collectives.exchange(grad, receive, send, axis),
    )


def permuted(rows: Tensor, order: Tensor) -> Tensor:
    """Returns rows[order]; `order` is a permutation."""
    return _Permuted.apply(rows, order)


class _Permuted(Function):
    """Permutes rows. Backward is a plain permutation: torch's own would scatter-add, in a nondeterministic order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        result: Tensor = grad.new_empty(grad.shape)
        result[order] = grad
        return result, None

"""The head and the loss over a vocabulary that is split over the tensor-parallel ranks.

The logits of this rank's rows exist once and become their own gradient in place. Three numbers per token travel: the
largest logit, and with it the sum of the exponentials and the logit of the label.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.tensor_parallel import mappings
from megatron.tensor_parallel.linear import flat

_BLOCK = 1 << 20  # logits turned into their gradient at a time: fp32 copies stay in the cache


class VocabParallelHead(nn.Module):
    """Takes the place of `HeadAndLoss`; `vocab_size` is the true size, rows behind it have no part in anything."""

    def __init__(self, vocab_size: int, *, axis: Axis, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.vocab_size, self.axis, self.sequence_parallel = vocab_size, axis, sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """hidden [batch, seq (or a piece), hidden], weight [rows of this rank, hidden], labels [batch, seq] or None.

        Returns logits [batch, seq, vocabulary], or the loss [batch, seq] in fp32, the same on every rank.
        """
        enter = mappings.gathered if self.sequence_parallel else mappings.copied
        hidden = enter(hidden, self.axis)
        rows = weight.shape[0]
        held = min(max(self.vocab_size - self.axis.rank * rows, 0), rows)
        if labels is None:
            return self._logits(hidden, weight)
        first = self.axis.rank * rows
        loss = _ParallelCrossEntropy.apply(flat(hidden), weight, labels.reshape(-1), first, held, self.axis)
        return loss.view(labels.shape)

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "logits of a split vocabulary have no gradient: ask for the loss"
        return collectives.gather_along(F.linear(hidden, weight), self.axis, 2)[..., : self.vocab_size]


class _ParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, first: int, held: int, axis: Axis) -> Tensor:
        logits = hidden @ weight[:held].t()  # [tokens, rows held]
        wide = torch.promote_types(logits.dtype, torch.float32)
        peak = logits.new_full((len(labels),), float("-inf"), dtype=wide)
        if held:
            peak = logits.amax(-1).to(wide)
        collectives.all_reduce(peak, axis, "max")
        here = (labels >= first) & (labels < first + held)  # [tokens]: the label is in our rows
        local = (labels - first).masked_fill(~here, 0)
        sums = torch.zeros(2, len(labels), dtype=wide, device=logits.device)
        for rows in _row_blocks(len(labels), held):
            sums[0, rows] = (logits[rows].to(wide) - peak[rows, None]).exp_().sum(-1)
            target = logits[rows].gather(-1, local[rows, None]).squeeze(-1).to(wide) - peak[rows]
            sums[1, rows] = target.masked_fill(~here[rows], 0.0)
        collectives.all_reduce(sums, axis)
        log_sum = sums[0].log()
        ctx.save_for_backward(hidden, weight, local, here, peak + log_sum)
        ctx.logits = logits
        return log_sum - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        assert ctx.logits is not None, "the gradient of a split vocabulary's loss is kept for one backward pass only"
        hidden, weight, local, here, log_sum_exp = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        held = logits.shape[1]
        for rows in _row_blocks(len(local), held):
            soft = (logits[rows].to(log_sum_exp.dtype) - log_sum_exp[rows, None]).exp_()
            onehot = -here[rows].to(soft.dtype)
            soft.scatter_add_(-1, local[rows, None], onehot[:, None])
            logits[rows] = soft.mul_(grad[rows, None])
        grad_hidden = logits @ weight[:held] if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            torch.mm(logits.t(), hidden, out=grad_weight[:held])
            grad_weight[held:].zero_()
        return grad_hidden, grad_weight, None, None, None, None


def _row_blocks(tokens: int, columns: int) -> list[slice]:
    """Tokens whose logits are worked on together; none where no row of the vocabulary is held."""
    if not columns:
        return []
    step = max(1, _BLOCK // columns)
    return [slice(start, start + step) for start in range(0, tokens, step)]

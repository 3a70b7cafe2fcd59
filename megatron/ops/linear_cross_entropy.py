"""Head projection and cross-entropy in one differentiable step: the logits exist once and become their own gradient.

Composing F.linear and F.cross_entropy allocates [tokens, vocabulary] four times and walks it about a dozen times. Here
the forward pass turns each block of logits, while it is in cache, into softmax - onehot in place; the backward pass is
two matrix products. The gradient that arrives per token scales the small operand, so it may be anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.ops.ref import widened


class Workspace:
    """Keeps the largest buffer of a step for the next one.

    A C allocator gives large blocks back to the system at once, and touching fresh pages costs a fifth of the head's
    matrix product. Peak memory does not change: the buffer is live when memory is at its peak anyway. Accelerators
    have caching allocators, so there nothing is kept.
    """

    def __init__(self) -> None:
        self._spare: Tensor | None = None

    def take(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        spare, self._spare = self._spare, None
        if spare is not None and spare.shape == shape and spare.dtype == like.dtype and spare.device == like.device:
            return spare
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def give_back(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu":
            self._spare = buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, workspace: Workspace | None = None
) -> Tensor:
    """See `ref.linear_cross_entropy`. A `workspace` allows one backward pass per forward: it takes the buffer."""
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        return _loss_only(hidden, weight[:vocab_size], labels)
    return _LinearCrossEntropy.apply(hidden, weight, labels, vocab_size, workspace)


def _block_rows(columns: int, device: torch.device) -> int:
    """Rows per block: on a CPU its fp32 copies should stay in the cache; elsewhere it should fill the device."""
    elements = (1 << 20) if device.type == "cpu" else (1 << 26)
    return max(1, elements // columns)


def _loss_only(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """No gradient will be asked for: the logits of a few hundred tokens at a time are enough."""
    rows = max(256, _block_rows(weight.shape[0], hidden.device))
    losses = [
        _losses((part @ weight.t()), part_labels)
        for part, part_labels in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    return torch.cat(losses)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    target = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(widened(logits), dim=-1) - widened(target)


def _to_softmax_gradient(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Overwrite logits [tokens, padded vocabulary] with softmax - onehot, and return the loss of every token."""
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.empty(logits.shape[0], dtype=wide_dtype, device=logits.device)
    rows = _block_rows(vocab_size, logits.device)
    shape = (min(rows, logits.shape[0]), vocab_size)
    result = torch.empty(shape, dtype=wide_dtype, device=logits.device)
    copied = torch.empty(shape, dtype=wide_dtype, device=logits.device) if logits.dtype != wide_dtype else None
    logits[:, vocab_size:].zero_()  # padding has no meaning, hence no gradient
    for start in range(0, logits.shape[0], rows):
        block = logits[start : start + rows, :vocab_size]
        index = labels[start : start + rows].unsqueeze(-1)
        scores = block if copied is None else copied[: block.shape[0]].copy_(block)
        target, peak = scores.gather(-1, index), scores.amax(-1, keepdim=True)
        probability = torch.softmax(scores, -1, out=result[: block.shape[0]])
        # log-sum-exp from the largest probability, exp(peak - logsumexp), which is never small
        loss = peak - probability.amax(-1, keepdim=True).log() - target
        losses[start : start + rows] = loss.squeeze(-1)
        probability.scatter_add_(-1, index, torch.full_like(target, -1.0))
        block.copy_(probability)
    return losses


def _scaled_gradient(logits: Tensor, labels: Tensor, losses: Tensor, grad: Tensor, vocab_size: int) -> None:
    """Overwrite logits with (softmax - onehot) * grad, all of it in fp32 before it is rounded."""
    rows = _block_rows(vocab_size, logits.device)
    logits[:, vocab_size:].zero_()
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        block, index = logits[part, :vocab_size], labels[part].unsqueeze(-1)
        wide = widened(block)
        log_sum_exp = losses[part].unsqueeze(-1) + wide.gather(-1, index)
        probability = wide.sub(log_sum_exp).exp_()
        probability.scatter_add_(-1, index, torch.full_like(log_sum_exp, -1.0))
        block.copy_(probability.mul_(grad[part].unsqueeze(-1)))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, workspace: Workspace | None
    ) -> Tensor:
        # A CPU multiplies odd sizes as fast as even ones; a GPU wants the padding.
        used = weight[:vocab_size] if weight.device.type == "cpu" else weight
        shape = (hidden.shape[0], used.shape[0])  # [tokens, vocabulary]
        logits = hidden.new_empty(shape) if workspace is None else workspace.take(shape, hidden)
        torch.mm(hidden, used.t(), out=logits)
        # fp16 cannot hold softmax - onehot before the loss scale is in it: there it waits for the backward pass.
        late = logits.dtype == torch.float16
        losses = _losses(logits[:, :vocab_size], labels) if late else _to_softmax_gradient(logits, labels, vocab_size)
        ctx.save_for_backward(hidden, weight, labels, losses if late else None)
        ctx.logits, ctx.vocab_size, ctx.workspace, ctx.late = logits, vocab_size, workspace, late
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        assert ctx.logits is not None, "linear_cross_entropy keeps its gradient for one backward pass only"
        hidden, weight, labels, losses = ctx.saved_tensors
        logits, workspace = ctx.logits, ctx.workspace
        if ctx.late or workspace is not None:
            ctx.logits = None
        used = weight[: logits.shape[1]]
        scale = grad.unsqueeze(-1)  # [tokens, 1]
        if ctx.late:
            _scaled_gradient(logits, labels, losses, grad, ctx.vocab_size)
            scale = torch.ones_like(scale)
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = ((logits @ used) * scale).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            torch.mm(logits.t(), (hidden * scale).to(hidden.dtype), out=grad_weight[: logits.shape[1]])
            grad_weight[logits.shape[1] :].zero_()
        if workspace is not None:
            workspace.give_back(logits)
        return grad_hidden, grad_weight, None, None, None

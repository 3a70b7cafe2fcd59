"""Head projection and cross-entropy in one differentiable step: the logits exist once and become their own gradient.

Composing F.linear and F.cross_entropy allocates [tokens, vocabulary] four times and reads it about a dozen times. Here
the forward pass turns the logits into softmax - onehot in place, and the backward pass is two matrix products. The
incoming gradient per token scales the small operand, so it may have any value. If the vocabulary is split over ranks,
they exchange three numbers per token: the largest logit, the sum of exponentials and the label's logit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.ops import packed
from megatron.ops.cross_entropy import cross_entropy
from megatron.ops.logits import TORCH_LOGITS, LogitsMath, block_rows
from megatron.ops.operation import (
    Implementation,
    Native,
    Operation,
    Target,
    described,
    unsupported_devices,
    unsupported_floats,
)


class Workspace:
    """Keeps the logits' buffer, the largest of a step, for the next step. Used only on CPUs: accelerators have
    caching allocators.

    A C allocator returns large blocks to the system at once, and the first write to new pages takes a fifth of the time
    of the head's matrix product. Peak memory does not change, because the buffer is live at the peak anyway.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Workspace":
        return Workspace()

    def __reduce__(self) -> "tuple[type[Workspace], tuple[()]]":
        return Workspace, ()


@dataclass(frozen=True)
class VocabularyPart:
    """A vocabulary split over ranks: `weight` holds the rows from `first` on."""

    first: int
    reduce: Callable[[Tensor, Literal["max", "sum"]], None]  # in place, over the ranks


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    workspace: Workspace | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Loss of every token under logits = hidden @ weight.T, without the padding rows of `weight`.

    hidden [tokens, hidden], weight [padded vocabulary, hidden], labels [tokens] -> [tokens] in fp32 (or fp64).
    """
    if part is not None:  # a split vocabulary has no simpler formula
        return fused_linear_cross_entropy(
            hidden, weight, labels, vocab_size, workspace, part, product=packed.selected()
        )
    return cross_entropy(hidden @ weight[:vocab_size].t(), labels)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    workspace: Workspace | None = None,
    part: VocabularyPart | None = None,
    math: LogitsMath = TORCH_LOGITS,
    product: packed.Product = torch.matmul,
) -> Tensor:
    """Fused version of `linear_cross_entropy`. With a `workspace` or a `part`, a forward pass allows one backward pass,
    which consumes the buffer. The loss of a `part` is equal on all ranks. `product` computes the gradient of `hidden`.
    """
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        return _loss_only(hidden, weight, labels, vocab_size, part, math)
    return _LinearCrossEntropy.apply(hidden, weight, labels, vocab_size, workspace, part, math, product)


def _held(weight: Tensor, vocab_size: int, part: VocabularyPart | None) -> tuple[int, int]:
    """Returns (first entry, number of entries) of the vocabulary in the rows of `weight`; other rows are padding."""
    first = 0 if part is None else part.first
    return first, min(max(vocab_size - first, 0), weight.shape[0])


def _loss_only(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, part: VocabularyPart | None, math: LogitsMath
) -> Tensor:
    """Computes the loss without gradients; only the logits of a few hundred tokens exist at a time."""
    first, held = _held(weight, vocab_size, part)
    rows = max(256, block_rows(held, hidden.device))
    statistics = [
        math.statistics(piece @ weight[:held].t(), piece_labels, first, held, vocab_size)
        for piece, piece_labels in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    return _joined(torch.cat(statistics, dim=1), part)[0]


def _joined(statistics: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Combines the statistics of all ranks into loss and log-sum-exp of every token."""
    peak, total, target = statistics
    if part is not None:
        highest = peak.clone()
        part.reduce(highest, "max")
        sums = torch.stack((total * torch.exp(peak - highest), target))
        part.reduce(sums, "sum")
        peak, (total, target) = highest, sums
    log_sum = total.log()
    return log_sum - (target - peak), log_sum + peak


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        workspace: Workspace | None,
        part: VocabularyPart | None,
        math: LogitsMath,
        product: packed.Product,
    ) -> Tensor:
        first, held = _held(weight, vocab_size, part)
        # On a CPU odd sizes are as fast as even ones; on a GPU the padded size is faster.
        used = weight[:held] if weight.device.type == "cpu" else weight
        shape = (hidden.shape[0], used.shape[0])  # [tokens, vocabulary]
        logits = hidden.new_empty(shape) if workspace is None else workspace.take(shape, hidden)
        torch.mm(hidden, used.t(), out=logits)
        log_sum_exp = None
        # Two gradients are deferred to backward: over a split vocabulary, which needs the other ranks' statistics, and
        # in fp16, where softmax - onehot would underflow without the loss scale.
        if part is not None or logits.dtype == torch.float16:
            losses, log_sum_exp = _joined(math.statistics(logits, labels, first, held, vocab_size), part)
        else:
            losses = math.in_place_(logits, labels, held)
        ctx.save_for_backward(hidden, weight, labels, log_sum_exp)
        ctx.logits, ctx.columns, ctx.workspace = logits, (first, held), workspace
        ctx.math, ctx.product = math, product
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.logits is not None, "linear_cross_entropy allows one backward pass per forward pass"
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        logits, workspace = ctx.logits, ctx.workspace
        if log_sum_exp is not None or workspace is not None:
            ctx.logits = None
        used = weight[: logits.shape[1]]
        scaled = hidden
        if log_sum_exp is not None:
            ctx.math.gradient_(logits, labels, log_sum_exp, grad.contiguous(), *ctx.columns)
        else:
            scaled = (hidden * grad.unsqueeze(-1)).to(hidden.dtype)
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = ctx.product(logits, used)
            if log_sum_exp is None:
                grad_hidden = (grad_hidden * grad.unsqueeze(-1)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            torch.mm(logits.t(), scaled, out=grad_weight[: logits.shape[1]])
            grad_weight[logits.shape[1] :].zero_()
        if workspace is not None:
            workspace.give_back(logits)
        return grad_hidden, grad_weight, *(None,) * 6


def _unsupported(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, workspace: Any = None, part: Any = None
) -> str | None:
    matrices = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not matrices or labels.dtype != torch.int64 or labels.shape != hidden.shape[:1]:
        return (
            f"hidden {described(hidden)}, weight {described(weight)} and labels {described(labels)}: "
            "the kernel needs [tokens, hidden], [vocabulary, hidden] and int64 [tokens]"
        )
    return unsupported_floats(hidden, weight) or unsupported_devices(hidden, labels)


def _portable(target: Target) -> Implementation:
    function = partial(fused_linear_cross_entropy, product=packed.selected())
    return Implementation("torch", function, f"the logits become their own gradient in place{packed.note(target)}")


def _native_linear_cross_entropy(ops: Any, *args: Any, **named: Any) -> Tensor:
    math = LogitsMath(ops.xent_statistics, ops.xent_gradient_, ops.xent_in_place_)
    return partial(fused_linear_cross_entropy, math=math, product=packed.selected())(*args, **named)


_NATIVE = Native("cross_entropy", _native_linear_cross_entropy, _unsupported, left_to_compiler=False, note=packed.note)
OPERATIONS = (Operation("linear_cross_entropy", linear_cross_entropy, _portable, _NATIVE),)

"""Cross-entropy on logits that may be overwritten, in torch's operations: works in every dtype; the fallback of csrc/.

All functions process blocks whose fp32 copies stay in a CPU's cache. `first` is the offset of this rank's columns in
the vocabulary. A split vocabulary and fp16 use `statistics`, then `gradient_`; other cases use only `in_place_`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.utils.dtype import widened


def statistics(logits: Tensor, labels: Tensor, first: int, columns: int, vocab_size: int) -> Tensor:
    """Returns [3, tokens]: the largest of the first `columns` logits, the sum of exp(logit - largest), and the label's
    logit (0 if another rank has it)."""
    _check_labels(labels, vocab_size)
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    result = torch.zeros(3, len(labels), dtype=wide_dtype, device=logits.device)
    result[0] = -torch.inf
    here, local = _local(labels, first, columns)
    for rows in _row_blocks(logits, columns):
        wide = widened(logits[rows, :columns])
        peak = wide.amax(-1)
        result[0, rows] = peak
        result[1, rows] = (wide - peak.masked_fill(peak == -torch.inf, 0.0)[:, None]).exp_().sum(-1)
        result[2, rows] = wide.gather(-1, local[rows, None]).squeeze(-1).masked_fill(~here[rows], 0.0)
    return result


def gradient_(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, first: int, columns: int) -> None:
    """Overwrites logits with (softmax - onehot) * grad, rounded once, and those from `columns` on with 0."""
    here, local = _local(labels, first, columns)
    logits[:, columns:].zero_()
    for rows in _row_blocks(logits, columns):
        block = logits[rows, :columns]
        probability = (widened(block) - log_sum_exp[rows, None]).exp_()
        probability.scatter_add_(-1, local[rows, None], -here[rows, None].to(probability.dtype))
        block.copy_(probability.mul_(grad[rows, None]))


def in_place_(logits: Tensor, labels: Tensor, columns: int) -> Tensor:
    """Overwrites logits with softmax - onehot, and those from `columns` on with 0. Returns the loss of every token."""
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.empty(len(labels), dtype=wide_dtype, device=logits.device)
    logits[:, columns:].zero_()
    for rows in _row_blocks(logits, columns):
        block, index = logits[rows, :columns], labels[rows, None]
        scores = widened(block)
        target, peak = scores.gather(-1, index), scores.amax(-1, keepdim=True)
        probability = torch.softmax(scores, -1)
        # log-sum-exp from the largest probability, exp(peak - logsumexp), which is never small
        losses[rows] = (peak - probability.amax(-1, keepdim=True).log() - target).squeeze(-1)
        probability.scatter_add_(-1, index, torch.full_like(target, -1.0))
        block.copy_(probability)
    return losses


@dataclass(frozen=True)
class LogitsMath:
    """The three functions above, or the kernels of csrc/ that replace them."""

    statistics: Callable[[Tensor, Tensor, int, int, int], Tensor] = statistics
    gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], None] = gradient_
    in_place_: Callable[[Tensor, Tensor, int], Tensor] = in_place_


TORCH_LOGITS = LogitsMath()


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raises on labels outside the vocabulary, whose loss would look plausible. On a CPU only, to avoid a host sync."""
    if labels.device.type == "cpu" and labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < vocab_size:
        raise IndexError(
            f"cross_entropy: the labels are between {labels.min()} and {labels.max()}, but must be between 0 and "
            f"{vocab_size - 1} for a vocabulary of {vocab_size} entries"
        )


def _local(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns (True if the label is in this rank's columns, its column or 0)."""
    here = (labels >= first) & (labels < first + columns)
    return here, (labels - first).masked_fill(~here, 0)


def block_rows(columns: int, device: torch.device) -> int:
    """Number of rows per block. On a CPU, a block's fp32 copies stay in the cache; on another device, a block is large
    enough to use the whole device."""
    elements = (1 << 20) if device.type == "cpu" else (1 << 26)
    return max(1, elements // max(columns, 1))


def _row_blocks(logits: Tensor, columns: int) -> Iterator[slice]:
    """Yields blocks of tokens; none if this rank holds no row of the vocabulary."""
    step = block_rows(columns, logits.device)
    for start in range(0, logits.shape[0] if columns else 0, step):
        yield slice(start, start + step)

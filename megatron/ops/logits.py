"""Cross-entropy on logits that may be overwritten, in torch's operations: for every dtype, and the fallback of csrc/.

All of it walks blocks whose fp32 copies stay in a CPU's cache. `first` is where this rank's columns begin in the
vocabulary; a split vocabulary and fp16 take `statistics`, then `gradient_`, the others `in_place_` alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.utils.dtype import widened


def statistics(logits: Tensor, labels: Tensor, first: int, columns: int, vocab_size: int) -> Tensor:
    """[3, tokens]: the largest of the first `columns` logits, the sum of exp(logit - largest), the label's logit (0
    where it is not among them)."""
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
    """Overwrites logits with (softmax - onehot) * grad, rounded once; those behind `columns` with 0."""
    here, local = _local(labels, first, columns)
    logits[:, columns:].zero_()
    for rows in _row_blocks(logits, columns):
        block = logits[rows, :columns]
        probability = (widened(block) - log_sum_exp[rows, None]).exp_()
        probability.scatter_add_(-1, local[rows, None], -here[rows, None].to(probability.dtype))
        block.copy_(probability.mul_(grad[rows, None]))


def in_place_(logits: Tensor, labels: Tensor, columns: int) -> Tensor:
    """Overwrites logits with softmax - onehot, those behind `columns` with 0; returns the loss of every token."""
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
    """These three functions, or the kernels of csrc/ in their place."""

    statistics: Callable[[Tensor, Tensor, int, int, int], Tensor] = statistics
    gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], None] = gradient_
    in_place_: Callable[[Tensor, Tensor, int], Tensor] = in_place_


TORCH_LOGITS = LogitsMath()


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    """Refuses labels outside of the vocabulary: their loss would look plausible. Not on a device: no host sync."""
    if labels.device.type == "cpu" and labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < vocab_size:
        raise IndexError(
            f"cross_entropy: labels reach from {labels.min()} to {labels.max()}, the vocabulary has "
            f"{vocab_size} entries"
        )


def _local(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Which labels are among our columns, and where (elsewhere 0)."""
    here = (labels >= first) & (labels < first + columns)
    return here, (labels - first).masked_fill(~here, 0)


def block_rows(columns: int, device: torch.device) -> int:
    """Rows per block: on a CPU its fp32 copies should stay in the cache; elsewhere it should fill the device."""
    elements = (1 << 20) if device.type == "cpu" else (1 << 26)
    return max(1, elements // max(columns, 1))


def _row_blocks(logits: Tensor, columns: int) -> Iterator[slice]:
    """Blocks of tokens; none if this rank holds no row of the vocabulary."""
    step = block_rows(columns, logits.device)
    for start in range(0, logits.shape[0] if columns else 0, step):
        yield slice(start, start + step)

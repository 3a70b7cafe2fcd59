"""Splits sequences into training, validation and test, and counts the samples that a run needs of each."""

from __future__ import annotations

from megatron.config.split import Shares
from megatron.errors import ConfigError

SPLIT_RULES = ("23.06", "main")


def split_bounds(shares: Shares, sequences: int, rule: str = "23.06") -> tuple[int, int, int, int]:
    """The bounds b, where split k holds sequences b[k] <= i < b[k + 1]."""
    if rule == "main":
        cumulative = [0.0]
        for share in shares:
            cumulative.append(cumulative[-1] + share)
        bounds = [round(share * float(sequences)) for share in cumulative]
    elif rule == "23.06":
        bounds = [0]
        for share in shares:
            bounds.append(bounds[-1] + round(share * float(sequences)))
        surplus = bounds[-1] - sequences
        # Megatron's bound can be negative here, which trains on documents of another split; ours is at least 0.
        bounds = [0] + [max(0, bound - surplus) for bound in bounds[1:]]
    else:
        raise ConfigError(f"--split-rule {rule!r}: not known; use one of {', '.join(SPLIT_RULES)}")
    return (bounds[0], bounds[1], bounds[2], bounds[3])


def sample_counts(
    *,
    train_iters: int | None,
    train_samples: int | None,
    eval_interval: int | None,
    eval_iters: int,
    global_batch_size: int,
) -> tuple[int, int, int]:
    """The samples that a run needs: (train, valid, test). It evaluates after every interval and at the end."""
    if train_samples is not None:
        train = train_samples
        iterations = train_iters if train_iters is not None else train_samples // global_batch_size
    else:
        iterations = train_iters or 0
        train = iterations * global_batch_size
    evaluations = iterations // eval_interval + 1 if eval_interval else 1
    return train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size

"""Splits sequences into training, validation and test, and counts the samples that a run needs."""

from itertools import accumulate

from megatron.config.split import Shares


def split_bounds(shares: Shares, sequences: int, rule: str = "23.06") -> tuple[int, int, int, int]:
    """Returns bounds b; split k holds sequences b[k] <= i < b[k + 1]. `rule` is the value of --split-rule."""
    if rule == "main":
        bounds = [round(share * float(sequences)) for share in accumulate(shares, initial=0.0)]
    else:
        bounds = list(accumulate((round(share * float(sequences)) for share in shares), initial=0))
        surplus = bounds[-1] - sequences
        # In Megatron a bound can be negative here, which trains on documents of another split.
        bounds = [0] + [max(0, bound - surplus) for bound in bounds[1:]]
    return (bounds[0], bounds[1], bounds[2], bounds[3])


def sample_counts(
    *,
    train_iters: int | None,
    train_samples: int | None,
    eval_interval: int | None,
    eval_iters: int,
    global_batch_size: int,
) -> tuple[int, int, int]:
    """Returns the samples of a run: (train, valid, test). A run evaluates after each interval and at the end."""
    if train_samples is not None:
        train = train_samples
        iterations = train_iters if train_iters is not None else train_samples // global_batch_size
    else:
        iterations = train_iters or 0
        train = iterations * global_batch_size
    evaluations = iterations // eval_interval + 1 if eval_interval else 1
    return train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size

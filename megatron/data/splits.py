"""Which sequences are for training, validation and test, and how many samples a run asks of each."""

from __future__ import annotations

from megatron.config.blend import parse_split
from megatron.errors import ConfigError

SPLIT_RULES = ("23.06", "main")


def split_bounds(text: str, sequences: int, rule: str = "23.06") -> tuple[int, int, int, int]:
    """Bounds b: split k holds the sequences b[k] <= i < b[k + 1]."""
    shares = parse_split(text)
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
        # Megatron can come out below 0 here, and then trains on documents of another split; we stop at 0.
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
    """Samples that a run asks for: (train, valid, test). An evaluation follows every interval and the end."""
    if train_samples is not None:
        train = train_samples
        iterations = train_iters if train_iters is not None else train_samples // global_batch_size
    else:
        iterations = train_iters or 0
        train = iterations * global_batch_size
    evaluations = iterations // eval_interval + 1 if eval_interval else 1
    return train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size

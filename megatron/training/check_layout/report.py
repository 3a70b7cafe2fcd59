"""What is printed of a comparison: the largest difference of each kind, and the verdict with its likeliest cause."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.config import DataConfig
from megatron.training.check_layout.outcome import Difference, Outcome

_NEAREST_CAUSE = ("counted tokens", "gradient", "weight")
"""Kinds of differences, those first that are nearest to what is wrong."""


def other_samples(got: Outcome, expected: Outcome, data: DataConfig) -> str | None:
    """Why nothing else can be equal: the two runs did not read the same samples."""
    steps = zip(got.samples, expected.samples, strict=True)
    step = next((number for number, (ours, theirs) in enumerate(steps, 1) if ours != theirs), None)
    if step is None:
        return None
    what = f"in step {step} the layout and one process read other samples"
    if data.dataloader_type != "cyclic":
        return (
            f"{what}, so nothing else is compared; a dataset must be the same on every rank and for any number of ranks"
        )
    if data.data_sharding:
        why = "shuffles a part of the data for each data-parallel rank, as Megatron does, so the order of samples"
        way = "add --no-data-sharding, or use --dataloader-type single"
    else:
        why = "ends an epoch with the last whole block of all data-parallel ranks, so the order after the first epoch"
        way = "use --dataloader-type single, or fewer --steps"
    return f"{what}: --dataloader-type cyclic {why} depends on the number of these ranks; {way}"


def table(differences: Sequence[Difference]) -> str:
    lines = ["largest relative difference of"]
    for kind in dict.fromkeys(difference.kind for difference in differences):
        some = [difference for difference in differences if difference.kind == kind]
        worst = max(some, key=_size)
        lines.append(f"  {kind:<19} {worst.size:8.1e}  ({worst.where}; {len(some)} compared)")
    return "\n".join(lines)


def verdict(differences: Sequence[Difference], tolerance: float, ranks: int) -> tuple[bool, str]:
    """Whether all are within the tolerance, and the line that says so or names the difference to begin with."""
    off = [difference for difference in differences if not _size(difference) <= tolerance]
    if not off:
        return True, f"EQUAL within {tolerance:g}: {ranks} ranks train what one process trains"
    first = min(off, key=_distance_to_cause)
    return False, (
        f"DIFFERENT beyond {tolerance:g}: first the {first.kind} of {first.where} ({first.size:.1e}); "
        f"{len(off)} of {len(differences)} comparisons"
    )


def _distance_to_cause(difference: Difference) -> int:
    known = difference.kind in _NEAREST_CAUSE
    return _NEAREST_CAUSE.index(difference.kind) if known else len(_NEAREST_CAUSE)


def _size(difference: Difference) -> float:
    """NaN is further apart than any number."""
    return math.inf if math.isnan(difference.size) else difference.size

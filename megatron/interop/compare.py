"""Compares two checkpoints of any format and layout, tensor by tensor, and names the first that differs."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.found_step import FoundStep, describe_step
from megatron.checkpoint.manifest import TensorRecord
from megatron.checkpoint.paths import MANIFEST, step_of
from megatron.interop.source import OTHER_PROGRAMS
from megatron.model.parameters import WORD_TABLE


def open_step(directory: Path) -> FoundStep:
    """Opens the step that --load would take, or the step that `directory` names."""
    number = step_of(directory.name)
    step = number if number is not None and not (directory / MANIFEST).is_dir() else None
    place = directory.parent if step is not None else directory
    found = describe_step(place, step=step, strict=True, check_hashes=True, source=OTHER_PROGRAMS)
    assert found is not None, "only a save directory may be empty"
    return found


def first_difference(one: FoundStep, other: FoundStep) -> str | None:
    """Describes the first difference in weights, optimizer state or step; None if all bits are equal."""
    rows = [
        step.manifest.model[WORD_TABLE].logical_shape[0] for step in (one, other) if WORD_TABLE in step.manifest.model
    ]
    if len(rows) == 2:  # Megatron-LM's tables may include padding
        one, other = one.with_vocabulary(min(rows)), other.with_vocabulary(min(rows))
    left, right = dict(_records(one)), dict(_records(other))
    names = [*left, *(name for name in right if name not in left)]
    for name in names:
        if name not in left or name not in right:
            return f"{name[0]}{_kind(name)} is in {(one if name in left else other).directory} only"
        if difference := _difference(one, other, name, left[name], right[name]):
            return f"{name[0]}{_kind(name)} {difference}"
    if one.manifest.step != other.manifest.step:
        return f"the tensors are equal, but the steps differ: {one.manifest.step} and {other.manifest.step}"
    return None


def _records(step: FoundStep) -> Iterator[tuple[tuple[str, str], TensorRecord]]:
    for name, record in step.manifest.model.items():
        yield (name, ""), record
    for name, kinds in step.manifest.optimizer.items():
        yield from (((name, kind), record) for kind, record in kinds.items())


def _kind(name: tuple[str, str]) -> str:
    return f" ({name[1]})" if name[1] else ""


def _difference(
    one: FoundStep, other: FoundStep, name: tuple[str, str], left: TensorRecord, right: TensorRecord
) -> str | None:
    if left.logical_shape != right.logical_shape:
        return f"has shape {left.logical_shape} in one, {right.logical_shape} in the other"
    if left.dtype != right.dtype:
        return f"is {left.dtype} in one, {right.dtype} in the other"
    a, b = (
        step.reader().logical(name[0], record).view(record.logical_shape)
        for step, record in ((one, left), (other, right))
    )
    return _first_element(a, b)


def _first_element(a: Tensor, b: Tensor) -> str | None:
    if torch.equal(a, b):
        return None
    unequal = (a != b) & ~((a != a) & (b != b))
    if not bool(unequal.any()):
        return None
    places = unequal.flatten().nonzero()
    at = int(places[0])
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(at), a.shape))
    values = a.flatten()[at].item(), b.flatten()[at].item()
    largest = float((a.double() - b.double()).abs().max())
    share = f"{len(places)} of {a.numel()} elements, by at most {largest:.3g}"
    return f"differs first at {place}: {values[0]} and {values[1]} ({share})"

"""Trains a few steps and keeps their numbers, gradients and weights; joins them over ranks; compares two runs.

The equivalence tests use the same functions as tools/check_layout.py.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.engine import StepResult
from megatron.errors import ReplicaError
from megatron.model.passes import Batch
from megatron.state.shard import Shard
from megatron.training.assemble import Parts

COPIES_AGREE = 1e-11
"""Largest absolute difference between replicas of a tensor: rounding in fp64."""
_NEGLIGIBLE = 1e-6

Stored = dict[str, tuple[Shard, Tensor]]
Numbers = dict[str, list[float]]


@dataclass(frozen=True)
class RankOutcome:
    """Numbers that one rank reported, the samples that it read, and its shards."""

    numbers: Numbers  # by their kind, in the order of the steps
    samples: list[list[int]]  # read in each step
    gradients: Stored  # of the first step
    weights: Stored  # after the last, with the buffers of the model's state


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of all ranks, with whole tensors."""

    numbers: Numbers
    samples: list[list[int]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def outcome_to_bytes(outcome: RankOutcome) -> bytes:
    torch.save(outcome, file := io.BytesIO())
    return file.getvalue()


def outcome_from_bytes(content: bytes) -> RankOutcome:
    """Unpickles an outcome; no code runs except the two constructors."""
    with torch.serialization.safe_globals([RankOutcome, Shard]):
        return torch.load(io.BytesIO(content), weights_only=True)


def train_outcome(parts: Parts, steps: int) -> RankOutcome:
    """Trains `steps` steps on weighted batches, then evaluates the first step's batches."""
    trainer, model, specs = parts.trainer, parts.engine.model, parts.checkpoints.specs
    read: list[Batch] = []
    trainer.train_batches = _kept(map(uneven_weights, trainer.train_batches), read)
    numbers: Numbers = {}
    samples: list[list[int]] = []
    gradients: Stored = {}
    first: list[Batch] = []
    for step in range(steps):
        result = trainer.iterate()
        assert result is not None, "no iteration is skipped here"
        for kind, number in _numbers(result).items():
            numbers.setdefault(kind, []).append(number)
        samples.append([number for batch in read for number in torch.as_tensor(batch.get("sample_ids", ())).tolist()])
        if step == 0:
            grads = trainer.engine.store
            gradients = {name: (specs[name], grads.whole_of(name, grad).clone()) for name, grad in grads.grads()}
            first = list(read)
        read.clear()
    numbers["evaluation loss"] = [parts.engine.evaluate(first).lm_loss]
    numbers["parameter norm"] = [trainer.engine.optimizer.params_norm().item()]
    state = {**dict(parts.engine.whole_weights()), **dict(model.named_buffers())}
    weights = {name: (specs[name], tensor.detach().clone()) for name, tensor in state.items() if name in specs}
    return RankOutcome(numbers, samples, gradients, weights)


def _kept(batches: Iterable[Batch], kept: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        kept.append(batch)
        yield batch


def _numbers(result: StepResult) -> dict[str, float]:
    return {
        "loss": result.lm_loss,
        "gradient norm": result.grad_norm,
        "counted tokens": float(result.counted_tokens),
        **{name.replace("_", " "): loss for name, loss in result.reported.items()},
    }


def uneven_weights(batch: Mapping[str, Any]) -> Batch:
    """Gives each token's loss its own weight, an integer from 1 to 21 that depends on sample and position.

    Every token counts, so an error in any token shows. Samples have different total weights, so a wrong average of
    means shows, too. Batches of a script's own dataset stay unchanged.
    """
    if not {"loss_mask", "sample_ids"} <= batch.keys():
        return batch
    samples, positions = batch["sample_ids"][:, None], torch.arange(batch["loss_mask"].shape[1])
    weights = (1 + 3 * samples % 7) * (1 + (5 * positions + samples) % 3)
    return {**batch, "loss_mask": batch["loss_mask"] * weights}


def join(ranks: Sequence[RankOutcome]) -> RunOutcome:
    """Joins the ranks' shards to whole tensors. Raises ReplicaError if replicas or reported numbers differ."""
    gradients = whole_tensors([rank.gradients for rank in ranks], what="gradient of ")
    weights = whole_tensors([rank.weights for rank in ranks])
    first = ranks[0]
    for number, other in enumerate(ranks):
        for kind, ours in first.numbers.items():
            if repr(ours) != repr(other.numbers[kind]):  # NaN equals NaN here
                raise ReplicaError(f"rank 0 and rank {number} report {kind} {ours} and {other.numbers[kind]}")
    samples = [sorted(set().union(*step)) for step in zip(*(rank.samples for rank in ranks), strict=True)]
    return RunOutcome(first.numbers, samples, gradients, weights)


def whole_tensors(parts: Sequence[Stored], agree_to: float = COPIES_AGREE, what: str = "") -> dict[str, Tensor]:
    """Joins every parameter from the ranks' shards; replicas must agree, and no element may be missing."""
    wholes: dict[str, Tensor] = {}
    for rank, part in enumerate(parts):
        for name, (spec, stored) in part.items():
            whole = wholes.setdefault(name, torch.full(spec.logical_shape, float("nan"), dtype=stored.dtype))
            before = spec.take(whole).clone()
            there = ~before.isnan()
            off = (before[there] - spec.view(stored)[there]).abs().max().item() if there.any() else 0.0
            if not off <= agree_to:
                holders = [n for n, other in enumerate(parts[:rank]) if name in other]
                listed = f"rank{'s' if len(holders) > 1 else ''} {', '.join(map(str, holders))}"
                raise ReplicaError(f"{what}{name}: copies on rank {rank} and {listed} differ by {off:.1e}")
            spec.put(whole, stored)
    holes = [name for name, whole in wholes.items() if whole.isnan().any()]
    if holes:
        raise ReplicaError(f"{what}{', '.join(holes)}: has NaN, or elements that no rank holds")
    return wholes


@dataclass(frozen=True)
class Difference:
    kind: str  # of the numbers, or "gradient", "weight"
    where: str
    size: float  # relative


def relative_differences(got: RunOutcome, expected: RunOutcome) -> list[Difference]:
    """Returns the relative difference of every number and tensor, in the order of the steps and of the model.

    For tensors, it is the norm of the difference over the norm of the expected tensor. This divisor has a lower bound,
    because some tensors are negligible beside the others. For example, the gradient of the key bias is zero in exact
    arithmetic, and Adam turns its rounding errors into full steps.
    """
    _check_same_names("number", got.numbers, expected.numbers)
    found = [
        Difference(kind, f"step {step}", _relative(abs(a - b), abs(b)))
        for kind, numbers in expected.numbers.items()
        for step, (a, b) in enumerate(zip(got.numbers[kind], numbers, strict=True), 1)
    ]
    least = _NEGLIGIBLE * _norm(expected.gradients.values())
    found += _of_tensors("gradient", got.gradients, expected.gradients, lambda _: least)
    count = sum(weight.numel() for weight in expected.weights.values())
    typical = _norm(expected.weights.values()) / math.sqrt(max(count, 1))
    found += _of_tensors("weight", got.weights, expected.weights, lambda size: typical * math.sqrt(size))
    return found


def _relative(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf


def _check_same_names(kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if ours.keys() != theirs.keys():
        raise ReplicaError(
            f"{', '.join(sorted(ours.keys() ^ theirs.keys()))}: only one of the two runs has this {kind}"
        )


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(tensor.norm().item() for tensor in tensors))


def _of_tensors(
    kind: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], least: Callable[[int], float]
) -> list[Difference]:
    _check_same_names(kind, ours, theirs)
    result = []
    for name, wanted in theirs.items():
        off = (ours[name] - wanted).norm().item()
        scale = max(wanted.norm().item(), least(wanted.numel()))
        result.append(Difference(kind, name, _relative(off, scale)))
    return result

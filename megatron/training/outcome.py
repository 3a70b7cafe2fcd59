"""What a few steps of a run gave, put together again to whole tensors, and how far two such outcomes are apart.

tools/check_layout.py shows a user with it that a layout trains what one process trains; the equivalence tests use the
same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.shard import ShardSpec
from megatron.engine import Batch
from megatron.errors import ReplicaError
from megatron.training.assemble import Parts

COPIES_AGREE = 1e-11
"""Ranks that hold the same part hold the same numbers, to rounding in fp64."""
_NEGLIGIBLE = 1e-6

Stored = dict[str, tuple[ShardSpec, Tensor]]


@dataclass(frozen=True)
class RankOutcome:
    """What one rank saw, and the parts that it holds."""

    losses: list[float]
    norms: list[float]
    gradients: Stored  # of the first step
    weights: Stored  # after the last

    def save(self, path: Path) -> None:
        """As plain values and tensors, so that reading it runs nothing."""
        tensors = {
            kind: {name: (asdict(spec), tensor) for name, (spec, tensor) in getattr(self, kind).items()}
            for kind in ("gradients", "weights")
        }
        torch.save({"losses": self.losses, "norms": self.norms, **tensors}, path)

    @staticmethod
    def read(path: Path) -> RankOutcome:
        saved = torch.load(path, weights_only=True)
        parts = {
            kind: {name: (ShardSpec(**spec), tensor) for name, (spec, tensor) in saved[kind].items()}
            for kind in ("gradients", "weights")
        }
        return RankOutcome(saved["losses"], saved["norms"], parts["gradients"], parts["weights"])


@dataclass(frozen=True)
class Outcome:
    """The same of all ranks together."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_outcome(parts: Parts, steps: int, change_batch: Callable[[Any], Batch]) -> RankOutcome:
    """Trains so many steps on batches that went through `change_batch`."""
    trainer, specs = parts.trainer, parts.checkpoints.specs
    trainer.train_batches = map(change_batch, trainer.train_batches)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        result = trainer.iterate()
        assert result is not None, "no iteration is left out here"
        losses.append(result.lm_loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = {name: (specs[name], grad.clone()) for name, grad in trainer.engine.grads.grads()}
    weights = {name: (specs[name], p.detach().clone()) for name, p in trainer.engine.model.named_parameters()}
    return RankOutcome(losses, norms, gradients, weights)


def uneven_mask(batch: Mapping[str, Any]) -> Batch:
    """Samples count differently many tokens, so that a mean of means is not the mean. A batch of somebody else's
    making is left as it is."""
    if not {"tokens", "loss_mask", "sample_ids"} <= batch.keys():
        return batch
    kept = torch.arange(batch["tokens"].shape[1]) < 3 + (batch["sample_ids"][:, None] * 5) % 11
    return {**batch, "loss_mask": batch["loss_mask"] * kept}


def join(ranks: Sequence[RankOutcome]) -> Outcome:
    """Ranks that contradict each other are a ReplicaError."""
    gradients = whole_tensors([rank.gradients for rank in ranks], what="gradient of ")
    weights = whole_tensors([rank.weights for rank in ranks])
    first = ranks[0]
    for number, other in enumerate(ranks):
        for what, ours, theirs in (("loss", first.losses, other.losses), ("norm", first.norms, other.norms)):
            if ours != theirs:
                raise ReplicaError(f"rank 0 and rank {number} report another {what}: {ours} and {theirs}")
    return Outcome(first.losses, first.norms, gradients, weights)


def whole_tensors(parts: Sequence[Stored], agree_to: float = COPIES_AGREE, what: str = "") -> dict[str, Tensor]:
    """Every parameter from the ranks' parts; what two ranks hold must agree, and nothing may be missing."""
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
                raise ReplicaError(f"{what}{name}: copies are {off:.1e} apart, that of rank {rank} and of {listed}")
            spec.put(whole, stored)
    holes = [name for name, whole in wholes.items() if whole.isnan().any()]
    if holes:
        raise ReplicaError(f"{what}{', '.join(holes)}: not a number, or no rank holds all of it")
    return wholes


@dataclass(frozen=True)
class Difference:
    kind: str  # "loss", "gradient norm", "gradient", "weight"
    where: str
    size: float  # relative


def differences(got: Outcome, expected: Outcome) -> list[Difference]:
    """All of them, in the order of the steps and of the model.

    Tensors are compared by their norms. The scale is that of the expected tensor, but not less than what is negligible
    beside the others: some gradients are zero in exact arithmetic (that of the key's bias), and an optimizer such as
    Adam makes steps of whatever rounding left there.
    """
    found = [
        Difference(kind, f"step {step}", abs(a - b) / abs(b) if a != b else 0.0)
        for kind, ours, theirs in (("loss", got.losses, expected.losses), ("gradient norm", got.norms, expected.norms))
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1)
    ]
    least = _NEGLIGIBLE * _norm(expected.gradients.values())
    found += _of_tensors("gradient", got.gradients, expected.gradients, lambda _: least)
    count = sum(weight.numel() for weight in expected.weights.values())
    typical = _norm(expected.weights.values()) / math.sqrt(count)
    found += _of_tensors("weight", got.weights, expected.weights, lambda size: typical * math.sqrt(size))
    return found


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(tensor.norm().item() for tensor in tensors))


def _of_tensors(
    kind: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], least: Callable[[int], float]
) -> list[Difference]:
    if ours.keys() != theirs.keys():
        raise ReplicaError(f"{', '.join(sorted(ours.keys() ^ theirs.keys()))}: a {kind} in one of the two runs only")
    result = []
    for name, wanted in theirs.items():
        off = (ours[name] - wanted).norm().item()
        result.append(Difference(kind, name, off / max(wanted.norm().item(), least(wanted.numel())) if off else 0.0))
    return result

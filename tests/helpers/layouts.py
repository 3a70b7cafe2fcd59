"""The same few steps at any layout, put together again to whole tensors, beside one process: what "equal" means.

expected = reference(argv)                     # one process, fp64
got = at_layout(4, argv + ["--tensor-model-parallel-size", "2"])
assert worst(got, expected) < 1e-10
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.shard import ShardSpec
from megatron.training.assemble import Parts
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import make_parts

STEPS = 5
COPIES_AGREE = 1e-11  # ranks that hold the same part hold the same numbers, to rounding
Change = Callable[[Parts], None]


@dataclass
class Outcome:
    """What a few optimizer steps gave, in whole tensors."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last


def reference(argv: Sequence[str]) -> Outcome:
    return _join([_train(0, 1, list(argv), None)])


def at_layout(ranks: int, argv: Sequence[str], change: Change | None = None, timeout: float = 120.0) -> Outcome:
    """`change` plants a bug: it runs on every rank before the first step."""
    return _join(run_ranks(ranks, _train, ranks, list(argv), change, timeout=timeout))


def at_layouts(ranks: int, cases: Sequence[Sequence[str]]) -> list[Outcome]:
    """Many cases, the ranks started once."""
    results = run_ranks(ranks, _train_all, ranks, [list(argv) for argv in cases], timeout=60.0 + 60.0 * len(cases))
    return [_join([rank[case] for rank in results]) for case in range(len(cases))]


def _train_all(rank: int, world_size: int, cases: list[list[str]]) -> list[dict[str, Any]]:
    return [_train(rank, world_size, argv, None) for argv in cases]


def worst(got: Outcome, expected: Outcome) -> float:
    """The largest relative difference of losses, gradient norms, and (per tensor, Frobenius) gradients and weights."""
    pairs = [*zip(got.losses, expected.losses, strict=True), *zip(got.norms, expected.norms, strict=True)]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    for ours, theirs in ((got.gradients, expected.gradients), (got.weights, expected.weights)):
        assert ours.keys() == theirs.keys() and theirs, sorted(ours.keys() ^ theirs.keys())
        for name, wanted in theirs.items():
            # The key's bias has a gradient that is zero in exact arithmetic: rounding noise is compared absolutely.
            differences.append((ours[name] - wanted).norm().item() / max(wanted.norm().item(), 1e-6))
    return max(differences)


def uneven_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Samples count differently many tokens, so a mean of means is not the mean."""
    kept = torch.arange(batch["tokens"].shape[1]) < 3 + (batch["sample_ids"][:, None] * 5) % 11
    return {**batch, "loss_mask": batch["loss_mask"] * kept}


def _train(rank: int, world_size: int, argv: list[str], change: Change | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=world_size, dtype=torch.float64)
    trainer = parts.trainer
    if change is not None:
        change(parts)
    trainer.train_batches = map(uneven_mask, trainer.train_batches)
    specs = parts.checkpoints.specs
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        result = trainer._one_iteration()
        assert result is not None
        losses.append(result.lm_loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = {name: (specs[name], grad.clone()) for name, grad in trainer.engine.grads.grads()}
    weights = {name: (specs[name], p.detach().clone()) for name, p in trainer.engine.model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def _join(ranks: list[dict[str, Any]]) -> Outcome:
    first = ranks[0]
    for other in ranks[1:]:
        assert other["losses"] == first["losses"], "ranks report different losses"
        assert other["norms"] == first["norms"], "ranks report different gradient norms"
    whole = {key: whole_tensors([rank[key] for rank in ranks]) for key in ("gradients", "weights")}
    return Outcome(first["losses"], first["norms"], whole["gradients"], whole["weights"])


def whole_tensors(
    parts: list[dict[str, tuple[ShardSpec, Tensor]]], agree_to: float = COPIES_AGREE
) -> dict[str, Tensor]:
    """Every parameter from the ranks' parts; what two ranks hold must agree, and nothing may be missing."""
    wholes: dict[str, Tensor] = {}
    for part in parts:
        for name, (spec, stored) in part.items():
            whole = wholes.setdefault(name, torch.full(spec.logical_shape, float("nan"), dtype=stored.dtype))
            before = spec.take(whole).clone()
            there = ~before.isnan()
            off = (before[there] - spec.view(stored)[there]).abs().max().item() if there.any() else 0.0
            assert off <= agree_to, f"{name}: two ranks hold numbers {off:g} apart"
            spec.put(whole, stored)
    holes = [name for name, whole in wholes.items() if whole.isnan().any()]
    assert not holes, f"no rank holds all of {holes}"
    return wholes

"""Trains a few steps at a layout, joins the ranks' shards to whole tensors, and compares them with one process.

expected = reference(argv)                     # one process, fp64
got = at_layout(4, argv + ["--tensor-model-parallel-size", "2"])
assert worst(got, expected) < 1e-10

tools/check_layout.py trains and joins (megatron/prove/check_layout/outcome.py). The measure is the tests' own and
stricter; the tests' planted bugs check all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf, isnan
from typing import Any

import torch

from megatron.errors import ReplicaError
from megatron.optimizer import Optimizer
from megatron.optimizer.rules.base import WHOLE_KINDS
from megatron.prove.check_layout.outcome import (
    RankOutcome,
    RunOutcome,
    join,
    train_outcome,
    uneven_weights,
    whole_tensors,
)
from megatron.training.assemble import Parts
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import TINY, flags, make_parts

__all__ = [
    "RunOutcome",
    "at_layout",
    "at_layouts",
    "expected",
    "few_batches",
    "largest",
    "no_deeper",
    "reference",
    "shallow",
    "two_rounds",
    "unequal",
    "uneven_weights",
    "whole_state",
    "whole_tensors",
    "worst",
]

STEPS = 2  # the second has an optimizer's state and buffers that were used before; the evaluation reads what it leaves
Change = Callable[[Parts], None]
Cases = dict[int, list[tuple[dict[str, Any], dict[str, Any]]]]
"""Number of ranks -> [(settings of the model, settings of the layout)]."""


def reference(argv: Sequence[str], steps: int = STEPS) -> RunOutcome:
    return _joined([_train(0, 1, list(argv), None, steps)])


def at_layout(ranks: int, argv: Sequence[str], change: Change | None = None, timeout: float = 120.0) -> RunOutcome:
    """`change` plants a bug: it runs on every rank before the first step."""
    return _joined(run_ranks(ranks, _train, ranks, list(argv), change, timeout=timeout))


def at_layouts(ranks: int, cases: Sequence[Sequence[str]], steps: int = STEPS) -> list[RunOutcome]:
    """Trains several cases on ranks that are started once."""
    argvs = [list(argv) for argv in cases]
    results = run_ranks(ranks, _train_all, ranks, argvs, steps, timeout=60.0 + 60.0 * len(cases))
    return [_joined([rank[case] for rank in results]) for case in range(len(cases))]


def _train_all(rank: int, world_size: int, cases: list[list[str]], steps: int) -> list[RankOutcome]:
    return [_train(rank, world_size, argv, None, steps) for argv in cases]


def worst(got: RunOutcome, expected: RunOutcome) -> float:
    """Largest relative difference of the steps' numbers, gradients and weights (per tensor, Frobenius)."""
    assert got.numbers.keys() == expected.numbers.keys() and got.samples == expected.samples
    pairs = [pair for kind, wanted in expected.numbers.items() for pair in zip(got.numbers[kind], wanted, strict=True)]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    for ours, theirs in ((got.gradients, expected.gradients), (got.weights, expected.weights)):
        assert ours.keys() == theirs.keys() and theirs, sorted(ours.keys() ^ theirs.keys())
        for name, wanted in theirs.items():
            # The key's bias has a gradient that is zero in exact arithmetic: rounding noise is compared absolutely.
            differences.append((ours[name] - wanted).norm().item() / max(wanted.norm().item(), 1e-6))
    return largest(differences)


def largest(differences: Sequence[float]) -> float:
    """The maximum, with NaN as infinity: `max` skips NaN unless it comes first."""
    return max(inf if isnan(difference) else difference for difference in differences)


def unequal(
    ranks: int,
    cases: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    tolerance: float,
    steps: int = STEPS,
) -> dict[str, float]:
    """Cases (settings of the model, of the layout) that do not train what one process trains, with the difference."""
    families = [few_batches(ranks, family, axes) for family, axes in cases]
    alone = [expected(tuple(flags(**family)), steps) for family in families]  # first: ranks fork what it has loaded
    outcomes = at_layouts(ranks, [flags(**family, **axes) for family, (_, axes) in zip(families, cases)], steps)
    found = {
        f"{number}: {axes}": worst(outcome, wanted)
        for number, ((_, axes), outcome, wanted) in enumerate(zip(cases, outcomes, alone, strict=True))
    }
    return {layout: difference for layout, difference in found.items() if not difference <= tolerance}


def no_deeper(family: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    """`family` with two layers instead of four if no pipeline divides them. Two show as much as four; one has no
    experts if the first of four has none."""
    if axes.get("pipeline_model_parallel_size", 1) > 1 or family.get("num_layers") != 4:
        return dict(family)
    kinds = {"moe_layer_freq": "[0,1]"} if "moe_layer_freq" in family else {}
    return {**family, **kinds, "num_layers": 2}


def shallow(cases: Cases) -> Cases:
    """Cases by number of ranks, each reduced by `no_deeper`."""
    return {ranks: [(no_deeper(family, axes), axes) for family, axes in some] for ranks, some in cases.items()}


def few_batches(ranks: int, family: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    """`family` with at most `two_rounds` samples per step."""
    settings = {**TINY, **family, **axes}
    return {**family, "global_batch_size": min(settings["global_batch_size"], two_rounds(ranks, settings))}


def two_rounds(ranks: int, settings: Mapping[str, Any]) -> int:
    """Smallest number of samples that shows what more would: two micro-batches per pipeline stage, which fill,
    alternate and empty it. With larger groups: one group of that size and a smaller one."""
    tp, cp, pp = (settings.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "context", "pipeline_model"))
    group = settings.get("microbatch_group_size_per_virtual_pipeline_stage", pp)
    return (pp + group) * settings["micro_batch_size"] * (ranks // (tp * cp * pp))


@cache
def expected(argv: tuple[str, ...], steps: int = STEPS) -> RunOutcome:
    """`reference`, cached by command line."""
    return reference(argv, steps)


def _train(rank: int, world_size: int, argv: list[str], change: Change | None, steps: int = STEPS) -> RankOutcome:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=world_size, dtype=torch.float64)
    if change is not None:
        change(parts)
    return train_outcome(parts, steps)


def _joined(ranks: list[RankOutcome]) -> RunOutcome:
    try:
        return join(ranks)
    except ReplicaError as error:
        raise AssertionError(str(error)) from error


def whole_state(optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """`state()` with whole parameters. A collective of the ranks that shard them."""
    grads = optimizer.store
    return {
        name: {kind: piece if kind in WHOLE_KINDS else grads.whole_of(name, piece) for kind, piece in kinds.items()}
        for name, kinds in optimizer.state().items()
    }

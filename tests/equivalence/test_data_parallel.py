"""Every data-parallel layout and micro-batch size computes what one process computes: fp64, 1e-10, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.engine import Engine
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.layouts import largest
from tests.helpers.runs import flags, make_parts

STEPS = 5
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"attention_dropout": 0, "hidden_dropout": 0},
    "llama": {
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "num_query_groups": 2,
        "group_query_attention": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
    },
}


def uneven_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Samples count differently many tokens, so a mean of means is not the mean."""
    kept = torch.arange(batch["tokens"].shape[1]) < 3 + (batch["sample_ids"][:, None] * 5) % 11
    return {**batch, "loss_mask": batch["loss_mask"] * kept}


def train(
    rank: int, world_size: int, argv: list[str], break_it: Callable[[Engine], None] | None = None
) -> dict[str, Any]:
    """STEPS optimizer steps; the losses, every gradient of the first step and the last weights."""
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=world_size, dtype=torch.float64)
    engine, trainer = parts.engine, parts.trainer
    if break_it is not None:
        break_it(engine)
    trainer.train_batches = map(uneven_mask, trainer.train_batches)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        result = trainer._one_iteration()
        assert result is not None
        losses.append(result.lm_loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = {name: grad.clone() for name, grad in engine.grads.grads()}
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def worst(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest relative difference of losses, gradient norms, and (per tensor, Frobenius) gradients and weights."""
    differences = [abs(x - y) / abs(y) for key in ("losses", "norms") for x, y in zip(a[key], b[key], strict=True)]
    for key in ("gradients", "weights"):
        assert a[key].keys() == b[key].keys() and a[key]
        for name, expected in b[key].items():
            scale = expected.norm().item()
            # The key's bias has a gradient that is zero in exact arithmetic: its rounding noise is compared absolutely.
            differences.append((a[key][name] - expected).norm().item() / max(scale, 1e-6))
    return largest(differences)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_every_layout_is_the_single_process(family: str, ranks: int, micro_batch: int) -> None:
    expected = train(0, 1, flags(**FAMILIES[family], micro_batch_size=2, optimizer="sgd"))
    argv = flags(**FAMILIES[family], micro_batch_size=micro_batch, optimizer="sgd")
    for result in run_ranks(ranks, train, ranks, argv):
        assert worst(result, expected) < 1e-10


@pytest.mark.parametrize("ranks", [2, 4])
def test_overlapped_reduction_is_the_same(ranks: int) -> None:
    expected = train(0, 1, flags(**FAMILIES["gpt2"], micro_batch_size=2, optimizer="sgd"))
    argv = flags(**FAMILIES["gpt2"], micro_batch_size=1, optimizer="sgd", overlap_grad_reduce=True)
    for result in run_ranks(ranks, train, ranks, argv):
        assert worst(result, expected) < 1e-10


# What the suite is worth: each planted bug must be seen.


def no_reduction(engine: Engine) -> None:
    engine.grads.reduce = lambda: None  # type: ignore[method-assign]


def mean_of_means(engine: Engine) -> None:
    forward = engine.passes.forward_step

    def wrong(model: Any, batch: Any) -> Any:
        total, count = forward(model, batch)
        return total / count * 32, torch.tensor(32.0)

    engine.passes.forward_step = wrong


def doubled_reduction(engine: Engine) -> None:
    reduce = engine.grads.reduce

    def twice() -> None:
        reduce()
        engine.grads.multiply(2.0)

    engine.grads.reduce = twice  # type: ignore[method-assign]


def local_token_count(engine: Engine) -> None:
    engine._sum_over_ranks = lambda totals: totals  # type: ignore[method-assign]


@pytest.mark.parametrize("bug", [no_reduction, mean_of_means, doubled_reduction, local_token_count])
def test_planted_bugs_are_seen(bug: Callable[[Engine], None]) -> None:
    expected = train(0, 1, flags(**FAMILIES["gpt2"], micro_batch_size=2, optimizer="sgd"))
    argv = flags(**FAMILIES["gpt2"], micro_batch_size=2, optimizer="sgd")
    try:
        results = run_ranks(2, train, 2, argv, bug)
    except RankFailed:
        return
    assert max(worst(result, expected) for result in results) > 1e-6

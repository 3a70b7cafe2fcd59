"""The loss is the sum over counted tokens divided by their number: its gradient equals autograd's, in fp64.

The other tests compare layouts with one process of the same code, so both sides would share an error in the divisor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.engine import Engine, StepResult
from megatron.model.linear import Linear
from megatron.optimizer import Rates
from tests.helpers.layouts import uneven_weights
from tests.helpers.runs import flags, make_parts

SETTINGS: dict[str, Any] = {"attention_dropout": 0, "hidden_dropout": 0, "clip_grad": 0, "optimizer": "sgd"}


def gradients(engine_step: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the first step, by the engine or by autograd on the written-out mean."""
    _, parts = make_parts(flags(**SETTINGS), dtype=torch.float64)
    engine, trainer = parts.trainer.engine, parts.trainer
    batches = [uneven_weights(batch) for _, batch in zip(range(4), trainer.train_batches)]
    if engine_step:
        results: list[StepResult] = []
        engine.train_step(
            batches,
            iteration=1,
            batch_size=8,
            tokens_per_sample=16,
            rates=lambda: Rates(0.0, 0.0),
            then=results.append,
        )
        (result,) = results
        return result.lm_loss, {name: grad.clone() for name, grad in engine.store.grads()}
    tokens, labels, mask = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels", "loss_mask"))
    assert mask.sum() > 2 * mask.numel()
    for module in engine.model.modules():
        if isinstance(module, Linear):
            module.wgrads = None  # the oracle's weight gradients are autograd's, not products sent elsewhere
    losses = engine.model(tokens, labels=labels)
    loss = (losses * mask).sum() / mask.sum()
    parameters = dict(engine.model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()))
    return loss.item(), dict(zip(parameters, found, strict=True))


def difference() -> float:
    (loss, ours), (expected, theirs) = gradients(True), gradients(False)
    assert ours.keys() == theirs.keys()
    apart = [((ours[name] - grad).norm() / grad.norm().clamp_min(1e-6)).item() for name, grad in theirs.items()]
    return max(abs(loss / expected - 1), *apart)


def test_the_mean_over_the_counted_tokens() -> None:
    assert difference() < 1e-12


def test_dividing_by_all_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Engine._sum_over_ranks

    def over_all(self: Engine, totals: Tensor) -> Tensor:
        loss, counted = sums(self, totals).unbind()
        return torch.stack([loss, torch.full_like(counted, 8 * 16)])

    monkeypatch.setattr(Engine, "_sum_over_ranks", over_all)
    assert difference() > 1e-2

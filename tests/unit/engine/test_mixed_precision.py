"""bf16 and fp16 with fp32 masters against the same steps written out by hand, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.engine import StepResult
from megatron.optimizer import Rates
from tests.helpers.runs import flags, make_parts, pretrain_gpt

STEPS, MICRO_BATCHES, TOKENS = 20, 4, 8 * 16


class ByHand:
    """Half weights, fp32 masters and gradient sums, torch's AdamW on the masters, Megatron's dynamic loss scale."""

    def __init__(self, model: nn.Module, *, lr: float, scale: float | None) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.halves = [p for _, p in model.named_parameters()]
        self.masters = [p.detach().float().clone() for p in self.halves]
        decayed = [m for m in self.masters if m.dim() > 1]
        others = [m for m in self.masters if m.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)
        self.scale, self.dynamic, self.good, self.forgiven = scale or 1.0, scale is not None, 0, 2

    def step(self, micro_batches: list[dict[str, Tensor]]) -> tuple[float, bool]:
        forward_step = pretrain_gpt().forward_step
        self.model.train()
        sums = [torch.zeros_like(m) for m in self.masters]
        loss_sum = 0.0
        for batch in micro_batches:
            total, _ = forward_step(self.model, batch)
            loss_sum += total.item()
            (total * (self.scale / TOKENS)).backward()
            for into, half in zip(sums, self.halves, strict=True):
                into += half.grad.float()
                half.grad = None
        overflow = not all(torch.isfinite(s).all() for s in sums)
        if not overflow:
            for master, grad in zip(self.masters, sums, strict=True):
                master.grad = grad * (1.0 / self.scale)
            self.adam.step()
            for half, master in zip(self.halves, self.masters, strict=True):
                half.data.copy_(master)
        if self.dynamic:
            self._move_scale(overflow)
        return loss_sum / TOKENS, overflow

    def _move_scale(self, overflow: bool) -> None:
        if overflow:
            self.good, self.forgiven = 0, max(0, self.forgiven - 1)
            if self.forgiven == 0:
                self.scale = max(self.scale / 2, 1.0)
            return
        self.good += 1
        if self.good == 5:
            self.good, self.forgiven, self.scale = 0, 2, self.scale * 2


@pytest.mark.parametrize(
    ("precision", "scale"),
    [({"bf16": True}, None), ({"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 5}, 2.0**20)],
)
def test_twenty_steps_are_those_written_by_hand(precision: dict[str, Any], scale: float | None) -> None:
    argv = flags(
        **precision,
        train_iters=STEPS,
        lr=1e-3,
        lr_decay_style="constant",
        attention_dropout=0,
        hidden_dropout=0,
        clip_grad=0.0,
        kernels="ref",
    )
    _, parts = make_parts(argv)
    _, others = make_parts(argv)  # the same initial model in separate memory
    hand = ByHand(others.engine.model, lr=1e-3, scale=scale)
    others.engine.store.close()  # gradients stay in p.grad
    skipped = 0
    for _ in range(STEPS):
        batches = [next(parts.trainer.train_batches) for _ in range(MICRO_BATCHES)]
        results: list[StepResult] = []
        parts.trainer.engine.train_step(
            batches,
            iteration=1,
            batch_size=8,
            tokens_per_sample=16,
            rates=lambda: Rates(1e-3, 0.01),
            then=results.append,
        )
        (result,) = results
        loss, overflow = hand.step([dict(batch) for batch in batches])
        assert (result.lm_loss, result.skipped) == (pytest.approx(loss, rel=1e-6), overflow)
        skipped += overflow
    assert parts.engine.optimizer.loss_scale == hand.scale
    assert scale is None or skipped, "the first steps are to overflow"
    state = parts.engine.optimizer.state()
    ours = dict(parts.engine.model.named_parameters())
    for name, half, master in zip(hand.names, hand.halves, hand.masters, strict=True):
        assert torch.equal(ours[name], half), name
        assert torch.equal(state[name]["master"], master), name


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ({"fp16": True, "loss_scale": 1e30}, "a gradient is not finite"),
        (
            {"fp16": True, "initial_loss_scale": 2.0**30, "min_loss_scale": 2.0**29},
            r"loss scale 5\.36871e\+08, \d+ steps",
        ),
    ],
)
def test_an_overflow_that_no_scale_will_help_stops_the_run(settings: dict[str, Any], stops: str) -> None:
    from megatron.errors import NonFiniteError

    _, parts = make_parts(flags(**settings, train_iters=20))
    with pytest.raises(NonFiniteError, match=stops), parts:
        parts.trainer.fit()
    with make_parts(flags(**settings, train_iters=5, no_check_for_nan_in_loss_and_grad=True))[1] as parts:
        parts.trainer.fit()
    assert parts.progress.iteration == 5


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**10}])
@pytest.mark.parametrize("tied", [True, False])
def test_padding_rows_of_the_vocabulary_stay_zero(precision: dict[str, Any], tied: bool) -> None:
    """Padding rows stay zero under Adam with weight decay: they have no logits, so no gradient."""
    argv = flags(**precision, weight_decay=0.1, untie_embeddings_and_output_weights=not tied)
    _, parts = make_parts(argv)
    with parts:
        parts.trainer.fit()
    padded = 0
    for name, parameter in parts.engine.model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert parameter.shape[0] == 112 and not parameter[97:].any(), name
            assert parameter[:97].any()
            padded += 1
    assert padded == (1 if tied else 2)

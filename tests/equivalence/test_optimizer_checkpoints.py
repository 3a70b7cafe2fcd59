"""State of each update rule in a checkpoint: a resumed run equals the one that did not stop. Another layout loads the
same state bit for bit, 8-bit codes included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimizer import state_spec
from megatron.optimizer.rules import eight_bits
from megatron.state.shard import Shard
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import few_batches, whole_state, whole_tensors
from tests.helpers.runs import LLAMA_SHAPE, Recorder, flags, make_parts

Held = dict[str, tuple[Shard, Tensor]]
COMMON: dict[str, Any] = {**LLAMA_SHAPE, "num_layers": 2, "micro_batch_size": 2, "train_iters": 4, "bf16": True}
BF16_MOMENTS = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
RULES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon", "decoupled_lr": 1e-3},
    "lion": {"optimizer": "lion"},
    "adam8bit": {"optimizer": "adam8bit"},
    "adam8bit, divided": {"optimizer": "adam8bit", "zero_stage": 1},
    "adafactor": {"optimizer": "adafactor", "adafactor_beta1": 0.9},
    "adafactor, divided": {"optimizer": "adafactor", "zero_stage": 1},
    "adamw, weights divided": {"zero_stage": 3},
    "lion, weights divided": {"optimizer": "lion", "zero_stage": 3},
    "bf16 moments": {**BF16_MOMENTS, "no_decoupled_weight_decay": True},
}
TP2 = {"tensor_model_parallel_size": 2}


def run(rank: int, ranks: int, argv: list[str], *, steps: bool = True) -> tuple[list[float], Held, Held]:
    """Losses of the steps, the final weights, and all state: as in a checkpoint, and as a rule holds it."""
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
    with parts:
        if steps:
            parts.trainer.fit()
        specs, optimizer = parts.checkpoints.specs, parts.engine.optimizer  # type: ignore[attr-defined]
        grads = parts.engine.store
        weights = {}
        for name, p in parts.engine.model.named_parameters():
            own = grads.weight(name) if hasattr(p, "device_mesh") else p  # of a DTensor, this rank's rows
            weights[name] = specs[name], own.detach().clone()
        state: Held = {}
        for name, kinds in whole_state(optimizer).items():
            state |= {f"{name}/{kind}": (state_spec(specs[name], kind, one), one) for kind, one in kinds.items()}
        divided = any(grads.divided_over(n).size > 1 for n in grads.names)
        slots = {} if divided else getattr(optimizer._update, "_slots", {})
        for name, slot in slots.items():
            same = {kind: t for kind, t in slot.state.items() if t.shape == slot.tensor.shape}
            state |= {f"{name}/{kind} in memory": (specs[name], t.double()) for kind, t in same.items()}
    return [record["lm_loss"] for record in records], weights, {key: (s, t.clone()) for key, (s, t) in state.items()}


def joined(ranks: list[Held]) -> dict[str, Tensor]:
    return whole_tensors(ranks, agree_to=0.0)


@pytest.mark.parametrize("name", RULES)
def test_resumed_and_in_another_layout(name: str, tmp_path: Path) -> None:
    axes = {} if "zero_stage" in RULES[name] else TP2
    settings = few_batches(2, {**COMMON, **RULES[name]}, axes)
    whole = run_ranks(2, run, 2, flags(**settings, **axes, save=tmp_path, save_interval=2))
    again = run_ranks(2, run, 2, flags(**settings, **axes, load=tmp_path, ckpt_step=2))
    for (losses, weights, state), (last_losses, last_weights, last_state) in zip(whole, again, strict=True):
        assert losses[2:] == last_losses and len(last_losses) == 2
        for ours, theirs in ((weights, last_weights), (state, last_state)):
            assert ours.keys() == theirs.keys() and ours
            assert all(torch.equal(ours[key][1], theirs[key][1]) for key in ours)
    saved = joined([state for _, _, state in whole])
    _, _, alone = run(0, 1, flags(**settings, load=tmp_path, ckpt_step=4), steps=False)
    loaded = joined([alone])
    assert saved.keys() == {key for key in loaded if axes or "in memory" not in key}
    for key, tensor in saved.items():
        assert torch.equal(tensor.flatten(), loaded[key].flatten()[: tensor.numel()]), key


def test_planted_bug_blocks_that_a_layout_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts every matrix into blocks along its columns; a row-parallel layer's blocks then depend on the layout."""
    monkeypatch.setattr(eight_bits, "BLOCK", 32)  # the test's matrices are small
    monkeypatch.setattr("megatron.optimizer.rules.choose.uncut_dim", lambda spec, parameter: 1)
    with pytest.raises(AssertionError, match=r"dense|4h_to_h"):
        test_resumed_and_in_another_layout("adam8bit", tmp_path)

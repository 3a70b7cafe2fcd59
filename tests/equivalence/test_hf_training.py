"""Ten steps of a Hugging Face model under our trainer equal ten under `transformers` with torch's AdamW: losses, and
weights after export. In fp64 only the arithmetic can differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.assemble import assemble
from tests.equivalence.test_hf_continue import FAMILIES, command, make_model, write_data
from tests.equivalence.test_transformers_parity import norms_in_fp64
from tests.helpers.other_programs import read_settings
from tests.helpers.runs import Recorder, make_run, pretrain_gpt

STEPS, RATE, DECAY = 10, 3e-3, 0.1
OPTIMIZER = {"lr": RATE, "weight_decay": DECAY, "clip_grad": 1.0, "adam_eps": 1e-8, "train_iters": STEPS}
# Models with experts have a balance loss, which only ours adds.
FAMILIES_OF_ONE_LOSS = [family for family in FAMILIES if family not in ("mixtral", "qwen3_moe")]


def trained_here(folder: Path, data: Path) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The loss of each step, and the texts of its micro-batches."""
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    texts: list[torch.Tensor] = []
    argv = command(folder, data, use_checkpoint_args=None, **OPTIMIZER)
    run, script = make_run(read_settings(argv), dtype=torch.float64), pretrain_gpt()

    def spy(model: Any, batch: Any) -> Any:
        texts.append(torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1))
        return script.forward_step(model, batch)

    with assemble(run, script.datasets_provider, script.model_provider, spy, hooks=[Recorder(records)]) as parts:
        parts.trainer.fit()
    each = len(texts) // STEPS
    return [record["lm_loss"] for record in records], [texts[i : i + each] for i in range(0, len(texts), each)]


def loss_of(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in the logits' dtype, because the model's own `loss` is rounded to fp32."""
    logits = model(text[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def trained_there(model: Any, batches: list[list[torch.Tensor]]) -> list[float]:
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8), []
    for texts in batches:
        loss = torch.stack([loss_of(model, text) for text in texts]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("family", FAMILIES_OF_ONE_LOSS)
def test_ten_steps_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = make_model(tmp_path / "theirs", family, **dropout_free(family)).double()
    ours, batches = trained_here(tmp_path / "theirs", write_data(tmp_path / "data"))
    with norms_in_fp64():
        expected = trained_there(theirs.train(), batches)
    assert len(ours) == STEPS and ours[-1] < 0.9 * ours[0]
    assert ours == pytest.approx(expected, rel=1e-9)


def dropout_free(family: str) -> dict[str, float]:
    return dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}

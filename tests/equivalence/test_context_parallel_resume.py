"""A run with a shared sequence, stopped and resumed, is the run that did not stop: bit for bit, with dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.equivalence.test_context_parallel import DOCUMENTS, KINDS, layout
from tests.equivalence.test_parallel_checkpoints import WITH_DROPOUT, read_by_one_process, train
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import few_batches
from tests.helpers.runs import flags


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_not_stopped(kind: str, tmp_path: Path) -> None:
    axes = layout(2, kind, tp=2)
    family = few_batches(4, {**DOCUMENTS, **WITH_DROPOUT}, axes)
    settings = flags(**family, **axes)
    whole = run_ranks(4, train, 4, settings)
    stopping = ["--exit-interval", "3", "--save", str(tmp_path), "--save-interval", "3"]
    half = run_ranks(4, train, 4, [*settings, *stopping])
    resumed = run_ranks(4, train, 4, [*settings, "--load", str(tmp_path)])
    for (losses, weights), (last_losses, last_weights) in zip(whole, resumed, strict=True):
        assert losses[3:] == last_losses and len(last_losses) == 3
        assert weights and all(torch.equal(weights[name][1], last_weights[name][1]) for name in weights)
    alone = read_by_one_process(family, tmp_path)
    _, kept = half[0][1]["final_layernorm.weight"]
    assert torch.equal(alone["final_layernorm.weight"], kept) and not torch.equal(kept, torch.ones_like(kept))

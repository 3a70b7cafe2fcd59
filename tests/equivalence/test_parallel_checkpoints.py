"""A checkpoint of any layout: a resumed run with dropout equals the one that did not stop, bit for bit. One process
reads from it exactly the model that the ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.state.shard import Shard
from tests.equivalence.test_model_parallel import COUNTED, GPT2, LLAMA, ODD, ONE_GROUP, SP, layout
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import few_batches, whole_tensors
from tests.helpers.runs import Recorder, flags, make_parts

WITH_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "optimizer": "adam", "train_iters": 4}
Held = dict[str, tuple[Shard, Tensor]]


def train(rank: int, ranks: int, argv: list[str]) -> tuple[list[float], Held]:
    """Losses of the steps, and the weights that this rank holds at the end."""
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
    with parts:
        parts.trainer.fit()
    specs = parts.checkpoints.specs
    weights = {name: (specs[name], p.detach().clone()) for name, p in parts.engine.model.named_parameters()}
    return [record["lm_loss"] for record in records], weights


def read_by_one_process(settings: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    _, parts = make_parts(flags(**settings, finetune=True, load=folder))
    return {name: p.detach() for name, p in parts.engine.model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "family", "axes"),
    [
        (4, GPT2, layout(tp=2, pp=2)),
        (4, ONE_GROUP, layout(tp=4, **SP)),
        (4, LLAMA, layout(tp=2, pp=2, num_layers_per_virtual_pipeline_stage=1)),
        (4, {**LLAMA, "num_layers": 2}, layout(pp=4, **COUNTED)),
        (8, ODD, layout(tp=2, pp=2, decoder_first_pipeline_num_layers=2, pipeline_schedule="zero-bubble")),
    ],
    ids=["tp2-pp2", "tp4-one-group", "interleaved", "stages-without-layers", "uneven-zero-bubble-dp2"],
)
def test_resume_and_reading(ranks: int, family: dict[str, Any], axes: dict[str, Any], tmp_path: Path) -> None:
    check_resume_and_reading(ranks, family, axes, tmp_path)


def check_resume_and_reading(ranks: int, family: dict[str, Any], axes: dict[str, Any], tmp_path: Path) -> None:
    settings = few_batches(ranks, {**family, **WITH_DROPOUT}, axes)
    whole = run_ranks(ranks, train, ranks, flags(**settings, **axes, save=tmp_path, save_interval=2))
    resumed = run_ranks(ranks, train, ranks, flags(**settings, **axes, load=tmp_path, ckpt_step=2))
    for (losses, weights), (last_losses, last_weights) in zip(whole, resumed, strict=True):
        assert losses[2:] == last_losses and len(last_losses) == 2
        assert weights.keys() == last_weights.keys() and weights
        assert all(torch.equal(weights[name][1], last_weights[name][1]) for name in weights)
    saved = whole_tensors([weights for _, weights in whole], agree_to=0.0)
    read = read_by_one_process(settings, tmp_path)
    assert saved.keys() == read.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor.flatten(), read[name].flatten()[: tensor.numel()]), name

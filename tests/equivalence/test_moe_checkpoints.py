"""Checkpoints of a model with experts: a resumed run equals an uninterrupted one bit for bit, with dropout and router
biases. One process reads what the ranks hold; a different model is rejected before it is filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import CheckpointError
from megatron.parallelize import persistent_buffers
from megatron.state.shard import Shard
from tests.equivalence.test_moe import CP, DEEPSEEK, EP, MIXTRAL, PP, SP, TP
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import few_batches, whole_tensors
from tests.helpers.runs import Recorder, flags, make_parts

WITH_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "optimizer": "adam", "train_iters": 4}
Held = dict[str, tuple[Shard, Tensor]]


def train(rank: int, ranks: int, argv: list[str]) -> tuple[list[dict[str, Any]], Held]:
    """Logged records, and all of this rank's model at the end."""
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
    with parts:
        parts.trainer.fit()
    return records, held(parts)


def held(parts: Any) -> Held:
    specs, model = parts.checkpoints.specs, parts.engine.model
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: (specs[name], tensor.detach().clone()) for name, tensor in tensors.items()}


def numbers(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("lm_loss", "grad_norm", "load_balancing_loss", "z_loss"))


@pytest.mark.parametrize(
    ("ranks", "family", "axes"),
    [
        (1, DEEPSEEK, {}),
        (4, DEEPSEEK, {EP: 2}),
        (4, DEEPSEEK, {EP: 2, TP: 2, **SP}),
        (4, MIXTRAL, {EP: 4, CP: 2}),
        (4, MIXTRAL, {EP: 2, PP: 2, "bf16": True}),
    ],
    ids=["one", "ep2-dp2", "ep2-tp2", "ep4-cp2", "ep2-pp2-bf16"],
)
def test_resume_and_reading(ranks: int, family: dict[str, Any], axes: dict[str, Any], tmp_path: Path) -> None:
    settings = few_batches(ranks, {**family, **WITH_DROPOUT}, axes)
    whole = run_ranks(ranks, train, ranks, flags(**settings, **axes, save=tmp_path, save_interval=2))
    resumed = run_ranks(ranks, train, ranks, flags(**settings, **axes, load=tmp_path, ckpt_step=2))
    for (records, state), (last_records, last_state) in zip(whole, resumed, strict=True):
        assert [numbers(r) for r in records[2:]] == [numbers(r) for r in last_records] and len(last_records) == 2
        assert state.keys() == last_state.keys() and state
        assert all(torch.equal(state[name][1], last_state[name][1]) for name in state)
    assert whole[0][0][0]["load_balancing_loss"] >= 0.9, "1 is even, more is not"
    saved = whole_tensors([state for _, state in whole], agree_to=0.0)
    biases = [tensor for name, tensor in saved.items() if name.endswith("expert_bias")]
    assert not family.get("moe_router_enable_expert_bias") or (biases and all(tensor.any() for tensor in biases))
    reading = {key: value for key, value in axes.items() if key == "bf16"}
    _, parts = make_parts(flags(**settings, **reading, finetune=True, load=tmp_path))
    read = held(parts)
    assert saved.keys() == read.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor.flatten(), read[name][1].flatten()[: tensor.numel()]), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, "--moe-router-topk"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "--moe-router-num-groups"),
        ({"num_experts": 6}, "--num-experts"),
        ({"num_experts": None}, "--num-experts"),
        ({"moe_ffn_hidden_size": 32}, "--moe-ffn-hidden-size"),
    ],
    ids=str,
)
def test_another_model_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    short = {**MIXTRAL, "train_iters": 1}
    train(0, 1, flags(**short, save=tmp_path, save_interval=1))
    with pytest.raises(CheckpointError, match=named):
        make_parts(flags(**{**short, **change}, load=tmp_path))

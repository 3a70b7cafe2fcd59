"""Bytes that a rank sends over each axis in a step: recordings of real steps against formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import parse_args
from megatron.layout import padded_vocab_size
from megatron.prove.order.cluster import ClusterRecording, record_clusters
from megatron.tensor_parallel import mappings
from tests.cluster.link_bytes import Shape, expected, numbers, second_step, seen
from tests.helpers.runs import flags, pretrain_gpt

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "max_position_embeddings": 48,
    "micro_batch_size": 2,
    "bf16": True,
    "train_iters": 2,
    "check_for_nan_in_loss_and_grad": False,
    "position_embedding_type": "learned_absolute",
}


def layout(tp: int = 1, pp: int = 1, cp: int = 1, **more: Any) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp}
    return {**sizes, **more}


SP = {"sequence_parallel": True}
CASES: list[tuple[int, dict[str, Any]]] = [
    (8, layout()),
    (4, layout(tp=2)),
    (8, layout(tp=4, **SP)),
    (8, layout(pp=4)),
    (4, layout(pp=2, num_layers_per_virtual_pipeline_stage=1)),
    *((8, layout(cp=4, cp_comm_type=kind)) for kind in ("p2p", "a2a", "allgather")),
    (16, layout(tp=2, pp=2, cp=2, cp_comm_type="a2a", pipeline_schedule="zero-bubble")),
    (16, layout(tp=2, pp=2, cp=2, **SP)),
    (8, layout(use_distributed_optimizer=True)),
    (16, layout(tp=2, pp=2, cp=2, use_distributed_optimizer=True)),
    (16, layout(tp=2, pp=2, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)),
]


def recorded(ranks: int, **settings: Any) -> ClusterRecording:
    torch.set_num_threads(1)
    config = parse_args(flags(**{**MODEL, **settings}))
    return record_clusters({"a run": config}, ranks, pretrain_gpt(), copies=())["a run"]


@pytest.mark.parametrize(("ranks", "axes"), CASES, ids=lambda value: str(value).replace("_parallel_size", ""))
def test_bytes_are_those_of_the_formulas(ranks: int, axes: dict[str, Any]) -> None:
    dp = ranks // (axes["tensor_model_parallel_size"] * axes["pipeline_model_parallel_size"])
    dp //= axes["context_parallel_size"]
    micro_batches = axes["pipeline_model_parallel_size"]
    cluster = recorded(ranks, **axes, global_batch_size=micro_batches * dp * MODEL["micro_batch_size"])
    per_stage = axes.get("num_layers_per_virtual_pipeline_stage")
    shape = Shape(
        layers=MODEL["num_layers"],
        hidden=MODEL["hidden_size"],
        kv=MODEL["hidden_size"],
        vocabulary=padded_vocab_size(97, 16, axes["tensor_model_parallel_size"]),
        positions=MODEL["max_position_embeddings"],
        batch=MODEL["micro_batch_size"],
        seq=MODEL["seq_length"],
        micro_batches=micro_batches,
        chunks=1 if per_stage is None else MODEL["num_layers"] // axes["pipeline_model_parallel_size"] // per_stage,
    )
    for rank, recording in cluster.programs.items():
        found = seen(recording, cluster.layout)
        kind = axes.get("cp_comm_type", "p2p")
        sp, divided = "sequence_parallel" in axes, "use_distributed_optimizer" in axes
        wanted = expected(shape, cluster.layout, rank, sp=sp, kind=kind, divided=divided)
        if divided:  # pieces are rounded up, by less than a thirtieth of this small model
            for name in {"dp_cp", "shard", "replicate"} & found.keys():
                assert wanted[name] <= found[name] < wanted[name] * 31 / 30
                found[name] = wanted[name]
        assert found == {name: number for name, number in wanted.items() if number}, rank
        assert numbers(recording) <= 64


def test_experts_send_every_chosen_row_there_and_back_twice() -> None:
    """Forward and backward. A rank sends its tokens times the experts of each, whatever the router decides. It sends
    back the rows that others sent here: on average as many."""
    experts = {"num_experts": 4, "expert_model_parallel_size": 2, "disable_bias_linear": True, "moe_router_topk": 2}
    cluster = recorded(4, **experts, global_batch_size=8)
    rows = MODEL["micro_batch_size"] * MODEL["seq_length"] * 2
    for recording in cluster.programs.values():
        exchanges = [op.given for op in second_step(recording) if op.kind == "all_to_all"]
        assert len(exchanges) == 4 * MODEL["num_layers"]
        assert exchanges[::2] == [rows * MODEL["hidden_size"]] * (2 * MODEL["num_layers"])


def test_planted_a_sum_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    once = mappings._sum
    monkeypatch.setattr(mappings, "_sum", lambda x, axis: once(once(x, axis), axis))
    with pytest.raises(AssertionError, match="'tp'"):
        test_bytes_are_those_of_the_formulas(4, layout(tp=2))

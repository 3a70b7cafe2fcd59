"""Comparing layouts covers every token: finds faults in the last chunk, stage, token, sample, micro-batch and window.

Each fault is a real mistake in one place of the layout's run, as small as that place allows. With a loss mask that
counts only the first tokens of each sample, as the comparison once had, most of these tests fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.context_parallel import blocks
from megatron.context_parallel.blocks import Pair
from megatron.context_parallel.ring import _Ringed
from megatron.model.moe import Router
from megatron.model.passes import Batch
from megatron.prove.check_layout import faults
from megatron.training.assemble import Parts
from tests.helpers.distributed import RankFailed
from tests.helpers.layouts import at_layout, expected, uneven_weights, worst
from tests.helpers.runs import LLAMA_SHAPE, flags

EQUAL = 1e-10
SEEN = 1e-7

COMMON: dict[str, Any] = {
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "optimizer": "sgd",
}
LLAMA: dict[str, Any] = {**COMMON, **LLAMA_SHAPE}
WINDOW = {**LLAMA, "window_size": (20, 0)}  # longer than a chunk, and shorter than two
SCALED = {**LLAMA, "use_rope_scaling": True, "rope_original_max_position": 32}
EXPERTS = {
    **LLAMA,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.05,
    "moe_expert_capacity_factor": 0.8,
    "moe_token_drop_policy": "position",
}


def context(kind: str = "p2p", ranks: int = 2) -> dict[str, Any]:
    return {"context_parallel_size": ranks, "cp_comm_type": kind}


TENSOR = {"tensor_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}


def difference(
    ranks: int, family: dict[str, Any], axes: dict[str, Any], plant: Callable[[Parts], None] | None
) -> float:
    try:
        outcome = at_layout(ranks, flags(**family, **axes), plant)
    except AssertionError as disagreement:  # of the ranks among each other
        assert not isinstance(disagreement, RankFailed), disagreement  # a fault that crashes or hangs proves nothing
        return float("inf")
    return worst(outcome, expected(tuple(flags(**family))))


def test_every_token_has_a_weight_and_samples_weigh_differently() -> None:
    tokens = torch.zeros(7, 64, dtype=torch.long)
    weights = uneven_weights({"tokens": tokens, "loss_mask": torch.ones(7, 64), "sample_ids": torch.arange(7)})
    mask = weights["loss_mask"]
    assert mask.min() >= 1 and torch.equal(mask, mask.round())
    assert len(set(mask.sum(1).tolist())) == 7
    assert all(len(set(sample.tolist())) == 3 for sample in mask)


# Faults that the tool can plant too (tools/check_layout.py --plant).

TOOL: dict[str, list[tuple[int, dict[str, Any], dict[str, Any]]]] = {
    "last-token": [(2, LLAMA, {}), (2, LLAMA, STAGES), (2, LLAMA, context())],
    "own-chunk-attention": [(2, LLAMA, context(kind)) for kind in ("p2p", "a2a", "allgather")],
    "last-chunk": [(4, LLAMA, context(kind, 4)) for kind in ("p2p", "a2a", "allgather")],
    "last-stage": [
        (2, LLAMA, STAGES),
        (2, {**LLAMA, "num_layers": 4}, {**STAGES, "num_layers_per_virtual_pipeline_stage": 1}),
        (4, LLAMA, {**STAGES, **TENSOR, "sequence_parallel": True}),
    ],
    "wide-window": [(2, WINDOW, context(kind)) for kind in ("p2p", "a2a", "allgather")],
    "unscaled-positions": [(2, SCALED, TENSOR), (2, SCALED, context())],
}


@pytest.mark.parametrize(("plant", "case"), [(plant, case) for plant, cases in TOOL.items() for case in cases])
def test_a_fault_of_the_tool_is_seen(plant: str, case: tuple[int, dict[str, Any], dict[str, Any]]) -> None:
    ranks, family, axes = case
    assert difference(ranks, family, axes, getattr(faults, plant.replace("-", "_"))) > SEEN


# Faults in the code of one place.


def own_chunks_of_the_ring(parts: Parts) -> None:
    """`distance != 0` in place of `distance < 0`: each chunk attends only to itself."""
    _filter_pairs(lambda pair, last: pair.distance == 0)


def last_chunk_without_the_first(parts: Parts) -> None:
    _filter_pairs(lambda pair, last: (pair.query_chunk, pair.key_chunk) != (last, 0))


def _filter_pairs(kept: Callable[[Pair, int], bool]) -> None:
    pairs = _Ringed.pairs

    def wrong(self: _Ringed, owner: int, chunk: int, document_ids: Tensor | None) -> Any:
        for q, k, pair in pairs(self, owner, chunk, document_ids):
            if kept(pair, 2 * self.cp.size - 1):
                yield q, k, pair

    _Ringed.pairs = wrong  # type: ignore[method-assign]


def last_rows_of_a_chunk(parts: Parts) -> None:
    """Attention works on a few queries at a time; those after the first few miss one key."""
    blocks._ROWS = {"cpu": 8}
    before = Pair.keys_before

    def wrong(self: Pair, stop: int, keys: int) -> int:
        return before(self, stop, keys) - (1 if stop > 8 else 0)

    Pair.keys_before = wrong  # type: ignore[method-assign]


def last_micro_batch_again(parts: Parts) -> None:
    """The second micro-batch of the last data-parallel rank repeats the first."""
    dp, made = parts.engine.parallel.dp, iter(parts.trainer.train_batches)
    if dp.rank < dp.size - 1:
        return

    def repeated() -> Any:
        for first in made:
            second = next(made)
            yield first
            yield {**first, "sample_ids": second["sample_ids"]}

    parts.trainer.train_batches = repeated()


def last_sample_of_an_evaluation(parts: Parts) -> None:
    """An evaluation leaves out the last batch of the last data-parallel rank."""
    evaluate, dp = parts.engine.evaluate, parts.engine.parallel.dp

    def wrong(batches: Any) -> Any:
        *others, last = batches
        if dp.rank == dp.size - 1:
            last = {**last, "loss_mask": torch.zeros_like(last["loss_mask"])}
        return evaluate([*others, last])

    parts.engine.evaluate = wrong  # type: ignore[method-assign]


def positions_of_an_evaluation(parts: Parts) -> None:
    """An evaluation puts the tokens twice as far apart as training does."""
    evaluate = parts.engine.evaluate

    def apart(batch: Batch) -> Batch:
        return {**batch, "position_ids": 2 * batch["position_ids"]}

    parts.engine.evaluate = lambda batches: evaluate(map(apart, batches))  # type: ignore[method-assign]


def capacity_of_the_last_layer(parts: Parts) -> None:
    """The last layer's experts have capacity for one token too many."""
    last = _last_router(parts)
    last.config = dataclasses.replace(last.config, moe_expert_capacity_factor=0.85)


def router_loss_of_the_last_layer(parts: Parts) -> None:
    """The last layer's router does not contribute to the objective."""
    _last_router(parts)._watched = lambda weights, *_: weights  # type: ignore[method-assign]


def _last_router(parts: Parts) -> Router:
    routers = [module for module in parts.engine.model.modules() if isinstance(module, Router)]
    return max(routers, key=lambda router: router.layer)


@pytest.mark.parametrize(
    ("plant", "ranks", "family", "axes"),
    [
        (own_chunks_of_the_ring, 2, LLAMA, context()),
        (own_chunks_of_the_ring, 4, LLAMA, context(ranks=4)),
        (last_chunk_without_the_first, 2, LLAMA, context()),
        (last_chunk_without_the_first, 4, LLAMA, context(ranks=4)),
        (last_rows_of_a_chunk, 2, LLAMA, context()),
        (last_micro_batch_again, 2, LLAMA, {}),
        (last_micro_batch_again, 2, LLAMA, STAGES),
        (last_sample_of_an_evaluation, 2, LLAMA, {}),
        (positions_of_an_evaluation, 2, LLAMA, STAGES),
        (capacity_of_the_last_layer, 2, EXPERTS, EXPERT),
        (router_loss_of_the_last_layer, 2, EXPERTS, EXPERT),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_in_the_code_is_seen(
    plant: Callable[[Parts], None], ranks: int, family: dict[str, Any], axes: dict[str, Any]
) -> None:
    assert difference(ranks, family, axes, plant) > SEEN

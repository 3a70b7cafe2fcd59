"""Context parallelism trains what one process trains: fp64, 1e-10, every gradient, all three exchanges.

Then bugs are planted, and each must be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.context_parallel import RingAttention, blocks, gathered, ulysses
from megatron.context_parallel.ring import _Ringed
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.engine import to_device as evaluation_module
from megatron.training.assemble import Parts
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.layouts import at_layout, expected, few_batches, unequal, uneven_weights, worst
from tests.helpers.runs import LLAMA_SHAPE, flags, make_parts

EQUAL = 1e-10
SEEN = 1e-6  # a planted bug moves something by at least this much
KINDS = ("p2p", "a2a", "allgather")

COMMON: dict[str, Any] = {
    "seq_length": 24,  # chunks of odd length with four ranks
    "max_position_embeddings": 24,
    "micro_batch_size": 2,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "optimizer": "sgd",
}
GPT2: dict[str, Any] = {**COMMON, "apply_query_key_layer_scaling": True}
LLAMA: dict[str, Any] = {
    **COMMON,
    **LLAMA_SHAPE,
    "group_query_attention": True,
    "num_query_groups": 2,
    "qk_layernorm": True,
}
ONE_GROUP = {**LLAMA, "num_query_groups": 1}
RECOMPUTED = {**LLAMA, "recompute_granularity": "full", "recompute_method": "uniform"}
SELECTIVE = {**GPT2, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
TWO_DOCUMENTS = {"tokenizer_type": "NullTokenizer", "vocab_size": 96, "reset_attention_mask": True}
DOCUMENTS = {**GPT2, **TWO_DOCUMENTS, "reset_position_ids": True, "eod_mask_loss": True}
LLAMA_DOCUMENTS = {**LLAMA, **TWO_DOCUMENTS}
WINDOW = {**LLAMA, "window_size": (7, 0)}  # reaches over a chunk boundary, and not to every chunk
NEOX = {**GPT2, "position_embedding_type": "rope", "rotary_percent": 0.25, "use_parallel_residual": True}
OLMO = {**LLAMA, "norm_placement": "after", "qk_layernorm_scope": "all"}
EXPERTS = {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.1}
EXPERTS["moe_router_load_balancing_type"] = "seq_aux_loss"
WINDOW_AND_DOCUMENTS = {**DOCUMENTS, "window_size": (5, 0)}


def layout(cp: int, kind: str, *, tp: int = 1, **more: Any) -> dict[str, Any]:
    return {"context_parallel_size": cp, "cp_comm_type": kind, "tensor_model_parallel_size": tp, **more}


SP = {"sequence_parallel": True}
CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    2: [
        *((family, layout(2, "p2p")) for family in (GPT2, ONE_GROUP, DOCUMENTS, WINDOW, RECOMPUTED)),
        *((family, layout(2, "a2a")) for family in (ONE_GROUP, DOCUMENTS)),
        *((family, layout(2, "allgather")) for family in (GPT2, WINDOW)),
    ],
    4: [
        *((family, layout(4, kind)) for kind in KINDS for family in (LLAMA, WINDOW_AND_DOCUMENTS)),
        *((ONE_GROUP, layout(2, kind, tp=2)) for kind in KINDS),
        *((family, layout(2, kind, tp=2, **SP)) for kind in KINDS for family in (GPT2, LLAMA_DOCUMENTS)),
        *((RECOMPUTED, layout(2, kind)) for kind in KINDS),
        (SELECTIVE, layout(2, "p2p", overlap_grad_reduce=True)),
        (NEOX, layout(2, "p2p", tp=2)),
        (OLMO, layout(2, "a2a", tp=2, **SP)),
        (GPT2, layout(2, "a2a", overlap_grad_reduce=True)),
        (EXPERTS, layout(2, "p2p", expert_model_parallel_size=2)),
        (DOCUMENTS, layout(2, "p2p", pipeline_model_parallel_size=2)),
        (LLAMA, layout(2, "allgather", pipeline_model_parallel_size=2, pipeline_schedule="zero-bubble")),
    ],
    8: [
        *((LLAMA_DOCUMENTS, layout(2, kind, tp=2, **SP)) for kind in KINDS),
        (GPT2, layout(2, "p2p", tp=2, pipeline_model_parallel_size=2, **SP)),
        (WINDOW, layout(4, "p2p", overlap_grad_reduce=True)),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_is_the_single_process(ranks: int) -> None:
    assert not unequal(ranks, CASES[ranks], EQUAL)


def evaluate(rank: int, world_size: int, cases: list[list[str]]) -> list[tuple[float, int]]:
    found = []
    for argv in cases:
        _, parts = make_parts(argv, rank=rank, world_size=world_size, dtype=torch.float64)
        batches = map(uneven_weights, parts.trainer.train_batches)
        result = parts.engine.evaluate(islice(batches, 4 // parts.engine.parallel.dp.size))
        found.append((result.lm_loss, result.counted_tokens))
    return found


def test_evaluation_is_the_single_process() -> None:
    cases = [flags(**DOCUMENTS, **layout(2, kind)) for kind in KINDS]
    (alone,) = evaluate(0, 1, [flags(**DOCUMENTS)])
    for rank in run_ranks(4, evaluate, 4, cases):
        for loss, counted in rank:
            assert loss == pytest.approx(alone[0], rel=1e-12) and counted == alone[1]


# Planted bugs: each must be seen.


def a_block_not_sent(parts: Parts) -> None:
    collectives.start_shift = lambda tensor, axis: collectives.Pending(tensor.clone)


def sent_to_the_wrong_neighbour(parts: Parts) -> None:
    original = collectives.start_shift

    def backwards(tensor: Tensor, axis: Axis) -> collectives.Pending:
        other = Axis(axis.name, axis.size - 1 - axis.rank, axis.size, axis.ranks[::-1], axis.group)
        return original(tensor, other)

    collectives.start_shift = backwards


def sent_round_the_wrong_ranks(parts: Parts) -> None:
    original, other = collectives.start_shift, parts.engine.parallel.dp
    collectives.start_shift = lambda tensor, axis: original(tensor, other)


def gradients_not_brought_home(parts: Parts) -> None:
    """Planted bug: drops the third of a layer's three backward shifts, which returns gradients to their owner."""
    original, calls, layers = collectives.start_shift, count(), 2

    def all_but_the_last(tensor: Tensor, axis: Axis) -> collectives.Pending:
        backward = next(calls) % (4 * layers) - layers
        left_out = backward >= 0 and backward % 3 == 2
        return collectives.Pending(tensor.clone) if left_out else original(tensor, axis)

    collectives.start_shift = all_but_the_last


def merged_without_rescaling(parts: Parts) -> None:
    def merge(result: Tensor, log_sum: Tensor, other: Tensor, other_sum: Tensor) -> None:
        result.add_(other)
        log_sum.copy_(torch.logaddexp(log_sum, other_sum))

    blocks.merge_partial_attention = merge


def a_chunk_too_much(parts: Parts) -> None:
    """Planted bug: causality by rank, not by chunk, although a later rank's second chunk is in the future."""
    pairs = _Ringed.pairs

    def wrong(self: _Ringed, owner: int, chunk: int, document_ids: Tensor | None) -> Any:
        yield from pairs(self, owner, chunk, document_ids)
        if owner > self.cp.rank:
            q, k, pair = next(pairs(self, self.cp.rank, chunk, document_ids))
            yield q, k, blocks.Pair(pair.query_chunk, pair.key_chunk, chunk, None, None, None)

    _Ringed.pairs = wrong  # type: ignore[method-assign]


def documents_forgotten(parts: Parts) -> None:
    RingAttention.visible = staticmethod(lambda *_: None)  # type: ignore[method-assign]


def gradients_not_summed_over_cp(parts: Parts) -> None:
    original, dp = collectives.start_all_reduce, parts.engine.parallel.dp
    collectives.start_all_reduce = lambda tensor, axis, *op: original(tensor, dp if axis.name == "dp_cp" else axis, *op)


def local_positions(parts: Parts) -> None:
    original = evaluation_module.slice_batch

    def wrong(batch: Any, cp: Axis) -> Any:
        part = original(batch, cp)
        return {**part, "position_ids": torch.arange(part["tokens"].shape[1]).expand_as(part["tokens"])}

    evaluation_module.slice_batch = wrong


def labels_not_cut_alike(parts: Parts) -> None:
    """Planted bug: labels are cut into contiguous pieces, the rest of the batch into balanced chunks."""
    original = evaluation_module.slice_batch

    def wrong(batch: Any, cp: Axis) -> Any:
        return {**original(batch, cp), "labels": batch["labels"].chunk(cp.size, 1)[cp.rank]}

    evaluation_module.slice_batch = wrong


def not_put_in_order(parts: Parts) -> None:
    gathered.in_sequence = ulysses.in_sequence = lambda x, ranks, dim: x
    gathered.by_rank = ulysses.by_rank = lambda x, ranks, dim: x


def heads_not_exchanged(parts: Parts) -> None:
    collectives.all_to_all = lambda tensor, axis: tensor.contiguous()


def exchanged_with_the_wrong_ranks(parts: Parts) -> None:
    original, other = collectives.all_to_all, parts.engine.parallel.dp
    collectives.all_to_all = lambda tensor, axis: original(tensor, other)


def gathered_from_the_wrong_ranks(parts: Parts) -> None:
    original, other = collectives.gather_along, parts.engine.parallel.dp
    collectives.gather_along = lambda tensor, axis, dim: original(tensor, other if axis.name == "cp" else axis, dim)


def own_gradients_only(parts: Parts) -> None:
    collectives.scatter_sum = lambda tensor, axis, dim: tensor.chunk(axis.size, dim)[axis.rank].contiguous()


@pytest.mark.parametrize(
    ("plant", "family", "axes"),
    [
        (a_block_not_sent, GPT2, layout(2, "p2p")),
        (sent_to_the_wrong_neighbour, GPT2, layout(4, "p2p")),
        (sent_round_the_wrong_ranks, GPT2, layout(2, "p2p")),
        (gradients_not_brought_home, GPT2, layout(2, "p2p")),
        (merged_without_rescaling, GPT2, layout(2, "p2p")),
        (a_chunk_too_much, GPT2, layout(2, "p2p")),
        (documents_forgotten, DOCUMENTS, layout(2, "p2p")),
        *((gradients_not_summed_over_cp, GPT2, layout(2, kind)) for kind in KINDS),
        (local_positions, GPT2, layout(2, "p2p")),
        (local_positions, LLAMA, layout(2, "a2a")),
        (labels_not_cut_alike, GPT2, layout(2, "p2p")),
        (not_put_in_order, GPT2, layout(2, "a2a")),
        (not_put_in_order, GPT2, layout(2, "allgather")),
        (heads_not_exchanged, GPT2, layout(2, "a2a")),
        (exchanged_with_the_wrong_ranks, GPT2, layout(2, "a2a")),
        (gathered_from_the_wrong_ranks, GPT2, layout(2, "allgather")),
        (own_gradients_only, GPT2, layout(2, "allgather")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_is_seen(plant: Callable[[Parts], None], family: dict[str, Any], axes: dict[str, Any]) -> None:
    family = few_batches(4, family, axes)
    try:
        outcome = at_layout(4, flags(**family, **axes), plant)
    except AssertionError as disagreement:
        assert not isinstance(disagreement, RankFailed)  # a plant that crashes or hangs is none
        return
    assert worst(outcome, expected(tuple(flags(**family)))) > SEEN

"""Expert parallelism, alone and with every other axis, trains what one process trains: fp64, 1e-10.

Compares losses, norms, every gradient and the weights after two steps, with router losses, weighted tokens, and experts
without tokens. test_moe_parity.py compares one process with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.distributed.parallel_state import Axis
from megatron.expert_parallel import ExpertDispatcher
from megatron.model import moe
from megatron.model.moe import MoE
from megatron.training.assemble import Parts
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.layouts import Cases, at_layout, expected, few_batches, no_deeper, reference, shallow, unequal, worst
from tests.helpers.runs import flags, make_parts

EQUAL = 1e-10
SEEN = 1e-6

# ---- layouts ---------------------------------------------------------------------------------------------------------

EP, TP = "expert_model_parallel_size", "tensor_model_parallel_size"
PP, CP = "pipeline_model_parallel_size", "context_parallel_size"
SP = {"sequence_parallel": True}

COMMON: dict[str, Any] = {
    "num_layers": 4,
    "micro_batch_size": 1,
    "init_method_std": 0.1,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "optimizer": "sgd",
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
}
MIXTRAL = {**COMMON, "num_experts": 4, "moe_router_topk": 2}
DEEPSEEK = {
    **COMMON,
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_layer_freq": "([0]*1+[1]*3)",
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
GROUPED = {**DEEPSEEK, "moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1}
MANY = {**MIXTRAL, "num_experts": 24, "moe_router_topk": 1, "moe_router_pre_softmax": True}  # most get no token
RECOMPUTED = {**DEEPSEEK, "recompute_granularity": "full", "recompute_method": "uniform"}
ODD = {**MIXTRAL, "num_experts": 6, "num_layers": 5, "vocab_size": 131, "seq_length": 15, "moe_layer_freq": 2}
FIRST_STAGE_DENSE = {**MIXTRAL, "moe_layer_freq": "[0,0,1,1]"}
DROPPING = {**MIXTRAL, "moe_expert_capacity_factor": 0.8}
LITTLE_KEPT = {**DEEPSEEK, "recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
LATE_DROPPED = {**DROPPING, "moe_token_drop_policy": "position"}

FOUR_LAYERS: Cases = {
    2: [
        (MIXTRAL, {EP: 2}),
        (MANY, {EP: 2}),
        (DEEPSEEK, {TP: 2}),
        (LITTLE_KEPT, {TP: 2, **SP}),
        (GROUPED, {EP: 2}),
        (RECOMPUTED, {PP: 2, "pipeline_schedule": "zero-bubble"}),
        (DEEPSEEK, {CP: 2}),
        ({**DROPPING, "moe_layer_recompute": True}, {EP: 2}),
        (LATE_DROPPED, {TP: 2}),
        (ODD, {}),
    ],
    4: [
        (DEEPSEEK, {EP: 4}),
        (MIXTRAL, {EP: 2, "overlap_grad_reduce": True}),
        (MANY, {EP: 4}),
        (MIXTRAL, {EP: 2, TP: 2}),
        (DEEPSEEK, {EP: 2, TP: 2, **SP}),
        (MANY, {EP: 2, TP: 2, **SP}),
        (DEEPSEEK, {EP: 2, PP: 2}),
        ({**GROUPED, "moe_layer_recompute": True}, {EP: 2, PP: 2, "pipeline_schedule": "zero-bubble"}),
        (FIRST_STAGE_DENSE, {EP: 2, PP: 2}),
        (MIXTRAL, {EP: 2, PP: 2, "pipeline_schedule": "zero-bubble", "overlap_grad_reduce": True}),
        (MANY, {EP: 2, PP: 2, "pipeline_schedule": "zero-bubble"}),
        (RECOMPUTED, {EP: 2, PP: 2, "num_layers_per_virtual_pipeline_stage": 1}),
        (DEEPSEEK, {EP: 2, CP: 2}),
        (MIXTRAL, {EP: 4, CP: 2}),
        (DROPPING, {EP: 2}),
        (ODD, {EP: 2}),
    ],
    8: [
        (DEEPSEEK, {EP: 2, TP: 2, **SP}),
        (MIXTRAL, {EP: 4, PP: 2}),
        (MIXTRAL, {EP: 2, TP: 2, PP: 2, **SP}),
        (DEEPSEEK, {EP: 4, TP: 2, CP: 2}),
    ],
}


CASES = shallow(FOUR_LAYERS)


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_is_the_single_process(ranks: int) -> None:
    assert not unequal(ranks, CASES[ranks], EQUAL)


@pytest.mark.parametrize("family", [MIXTRAL, DEEPSEEK, DROPPING], ids=["mixtral", "deepseek", "dropping"])
def test_the_micro_batch_size_does_not_matter(family: dict[str, Any]) -> None:
    outcome = reference(flags(**{**family, "micro_batch_size": 4}))
    assert worst(outcome, expected(tuple(flags(**family)))) < EQUAL


def test_a_loss_over_micro_batches_moves_with_their_size() -> None:
    """Megatron's default depends on the micro-batch size; a run with it logs that at the start."""
    family = {**MIXTRAL, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    difference = worst(reference(flags(**{**family, "micro_batch_size": 4})), expected(tuple(flags(**family))))
    assert difference > SEEN


def reported(rank: int, ranks: int, argvs: list[list[str]]) -> list[dict[str, float]]:
    """Router losses that the first step reports in each layout."""
    torch.set_num_threads(1)
    found = []
    for argv in argvs:
        _, parts = make_parts(argv, rank=rank, world_size=ranks, dtype=torch.float64)
        result = parts.trainer.iterate()
        assert result is not None
        found.append(dict(result.reported))
    return found


def test_every_layout_reports_the_same_router_losses() -> None:
    axes: list[dict[str, Any]] = [{}, {EP: 2, TP: 2}, {TP: 4, **SP, "num_query_groups": 4}, {PP: 2}, {CP: 2, EP: 4}]
    argvs = [flags(**{**DEEPSEEK, "num_query_groups": 4, "global_batch_size": 4, **some}) for some in axes]
    (expected_losses,) = reported(0, 1, argvs[:1])
    assert expected_losses.keys() == {"load_balancing_loss", "z_loss"} and min(expected_losses.values()) > 0.5
    for rank in run_ranks(4, reported, 4, argvs):
        for losses in rank:
            assert losses == pytest.approx(expected_losses, rel=1e-12)


def experts_of(parts: Parts) -> list[MoE]:
    return [module for module in parts.trainer.engine.model.modules() if isinstance(module, MoE)]


def buffers_of_a_gpu(parts: Parts) -> None:
    moe.kind_of = lambda kind: SimpleNamespace(asynchronous=True)
    moe.by_expert = None  # every layer has a capacity, so only `within_buffers` may be called


def padding_of_a_gpu(parts: Parts) -> None:
    for module in experts_of(parts):
        assert isinstance(module.dispatcher, ExpertDispatcher)
        assert module.dispatcher.taken is module.kernels.taken
        module.dispatcher.padding_after_exchange = 1
        module.dispatcher.padding = 0 if module.dispatcher.moves_rows else 1


@pytest.mark.parametrize(
    ("ranks", "family", "axes", "change"),
    [
        (2, DROPPING, {EP: 2}, buffers_of_a_gpu),
        (4, LATE_DROPPED, {EP: 2, TP: 2}, buffers_of_a_gpu),
        (2, DEEPSEEK, {TP: 2}, padding_of_a_gpu),
        (4, MANY, {EP: 2, TP: 2, **SP}, padding_of_a_gpu),
    ],
)
def test_the_rows_of_a_gpu_are_the_same(ranks: int, family: dict[str, Any], axes: dict[str, Any], change: Any) -> None:
    """Experts have buffers of a fixed size on a GPU, or at least one row each."""
    family = few_batches(ranks, no_deeper(family, axes), axes)
    outcome = at_layout(ranks, flags(**family, **axes), change)
    assert worst(outcome, expected(tuple(flags(**family)))) < EQUAL


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def is_seen(family: dict[str, Any], axes: dict[str, Any], plant: Callable[[Parts], None], ranks: int) -> bool:
    family = few_batches(ranks, no_deeper(family, axes), axes)
    try:
        outcome = at_layout(ranks, flags(**family, **axes), plant, timeout=120.0)
    except RankFailed:
        raise  # the bug is to give wrong numbers, not to crash
    except AssertionError:
        return True
    return worst(outcome, expected(tuple(flags(**family)))) > SEEN


def experts_summed_like_dense_ones(parts: Parts) -> None:
    grads, dp_cp = parts.trainer.engine.store, parts.trainer.engine.parallel.dp_cp
    for bucket in grads._buckets:
        bucket.axis = dp_cp


def experts_not_summed(parts: Parts) -> None:
    for bucket in parts.trainer.engine.store._buckets:
        if bucket.axis.name == "expert_dp":
            bucket.axis = Axis.single("expert_dp")


def results_in_wrong_order(parts: Parts) -> None:
    for module in experts_of(parts):
        inner = module.dispatcher.forward

        def wrong(*arguments: Any, inner: Any = inner) -> tuple[Tensor, Any]:
            rows, shared = inner(*arguments)
            return rows.flip(0), shared

        module.dispatcher.forward = wrong


def weights_not_multiplied(parts: Parts) -> None:
    for module in experts_of(parts):
        weigh = module.router._weights
        module.router._weights = (  # type: ignore[method-assign]
            lambda *args, weigh=weigh: weigh(*args) * 0 + 1
        )


def router_losses_counted_by_every_rank(parts: Parts) -> None:
    """Takes each rank's mean over its own sequences for the global mean."""
    steps = parts.trainer.engine.routers
    assert steps is not None
    begin = steps.begin

    def wrong(batches: Any, *, batch_size: int, factor: float) -> None:
        begin(batches, batch_size=batch_size // steps.parallel.dp_cp.size, factor=factor)

    steps.begin = wrong  # type: ignore[method-assign]


def router_losses_left_out(parts: Parts) -> None:
    steps = parts.trainer.engine.routers
    assert steps is not None
    steps.reports.attach = lambda weights, watch, losses: weights  # type: ignore[method-assign]


def router_losses_reported_once_too_often(parts: Parts) -> None:
    """Each tensor-parallel rank of a split sequence takes its piece for the whole."""
    steps = parts.trainer.engine.routers
    assert steps is not None
    steps.reports.pieces = 1


def sequences_counted_by_their_pieces(parts: Parts) -> None:
    for module in experts_of(parts):
        module.router.sum_of_sequence = lambda counts: counts


def shared_expert_forgotten(parts: Parts) -> None:
    for module in experts_of(parts):
        module._shared = lambda x: None  # type: ignore[method-assign]


def bias_not_stepped(parts: Parts) -> None:
    steps = parts.trainer.engine.routers
    assert steps is not None
    steps._step_biases = lambda counts, updated: None  # type: ignore[method-assign]


def bias_stepped_by_own_counts(parts: Parts) -> None:
    steps = parts.trainer.engine.routers
    assert steps is not None
    step = steps._step_biases

    def wrong(counts: Tensor, updated: Tensor) -> None:
        own = torch.zeros_like(counts)
        for layer, seen in steps.reports.counts.items():
            own[steps._layers.index(layer)] = seen
        step(own, updated)

    steps._step_biases = wrong  # type: ignore[method-assign]


def expert_norms_not_added(parts: Parts) -> None:
    counted = parts.trainer.engine.optimizer._by_axes
    alone = [counted._axes.index(over[:-1]) for over in counted._axes]
    counted._places = {name: replace(place, group=alone[place.group]) for name, place in counted._places.items()}


def queued_gradients_of_an_expert_forgotten(parts: Parts) -> None:
    for module in experts_of(parts):
        put, first = module.experts.put_weight_gradient, next(iter(module.experts.parameters()))
        assert put is not None

        def wrong(weight: Any, dy: Any, x: Any, put: Any = put, first: Any = first) -> None:
            put(weight, torch.zeros_like(dy) if weight is first else dy, x)

        module.experts.put_weight_gradient = wrong


def rows_of_the_next_expert(parts: Parts) -> None:
    """Each expert's first product uses the next expert's weights."""
    for module in experts_of(parts):
        linear = module.experts._linear

        def wrong(rows: Tensor, counts: Any, weights: Any, linear: Any = linear) -> Tensor:
            return linear(rows, counts, weights[1:] + weights[:1])

        module.experts._linear = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "family", "axes", "plant"),
    [
        (2, MIXTRAL, {EP: 2}, results_in_wrong_order),
        (2, MIXTRAL, {EP: 2}, weights_not_multiplied),
        (2, MIXTRAL, {EP: 2}, router_losses_counted_by_every_rank),
        (2, MIXTRAL, {EP: 2}, router_losses_left_out),
        (2, MIXTRAL, {EP: 2}, expert_norms_not_added),
        (2, MIXTRAL, {PP: 2, "pipeline_schedule": "zero-bubble"}, queued_gradients_of_an_expert_forgotten),
        (2, MIXTRAL, {EP: 2}, rows_of_the_next_expert),
        (2, DEEPSEEK, {EP: 2}, shared_expert_forgotten),
        (2, DEEPSEEK, {EP: 2}, bias_not_stepped),
        (2, DEEPSEEK, {EP: 2}, bias_stepped_by_own_counts),
        (2, DEEPSEEK, {TP: 2, **SP}, router_losses_reported_once_too_often),
        (2, DEEPSEEK, {CP: 2}, sequences_counted_by_their_pieces),
        (4, MIXTRAL, {EP: 2}, experts_summed_like_dense_ones),
        (4, MIXTRAL, {EP: 2}, experts_not_summed),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_is_seen(ranks: int, family: dict[str, Any], axes: dict[str, Any], plant: Any) -> None:
    assert is_seen(family, axes, plant, ranks)

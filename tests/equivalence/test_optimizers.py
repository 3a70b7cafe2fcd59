"""Optimizers that use more than one element train in every layout what one process trains: fp64, 1e-10.

Muon orthogonalises whole matrices, and each linear map of a fused one separately. 8-bit moments have the same blocks in
every layout. Adafactor's rows, columns and sizes are those of whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.distributed.parallel_state import Axis
from megatron.optimizer import matrices
from megatron.optimizer.matrices import WholeMatrices
from megatron.optimizer.rules.adafactor import Adafactor
from megatron.optimizer.rules.muon import Muon
from megatron.training.assemble import Parts
from tests.helpers.layouts import at_layout, expected, unequal, worst
from tests.helpers.runs import LLAMA_SHAPE, flags

EQUAL = 1e-10
SEEN = 1e-6

# Adam turns a gradient that is zero but for roundings into a whole step; with this epsilon it does not.
COMMON: dict[str, Any] = {
    "num_layers": 2,
    "micro_batch_size": 1,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "adam_eps": 1e-3,
    **LLAMA_SHAPE,
}
MUON = {**COMMON, "optimizer": "muon", "group_query_attention": True, "num_query_groups": 2, "muon_nesterov": True}
ONE_GROUP = {**MUON, "num_query_groups": 1}
WHOLE_QKV = {**MUON, "muon_no_split_qkv": True, "muon_coefficient_type": "simple"}
EXPERTS = {**MUON, "num_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
EIGHT_BITS = {**COMMON, "optimizer": "adam8bit"}
FACTORED = {
    **COMMON,
    "optimizer": "adafactor",
    "adafactor_beta1": 0.5,
    "adafactor_eps1": 1e-6,
    "group_query_attention": True,
    "num_query_groups": 2,
    "lr": 0.1,
}
FACTORED_BIASES = {**FACTORED, "num_query_groups": 1, "add_qkv_bias": True, "qk_layernorm": True}
FACTORED_EXPERTS = {**FACTORED, "num_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
DECOUPLED = {**MUON, "decoupled_lr": 3e-2, "untie_embeddings_and_output_weights": True}


def layout(tp: int = 1, pp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    return {**{name: size for name, size in sizes.items() if size > 1}, **more}


CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    2: [
        (MUON, layout()),
        (MUON, layout(tp=2)),
        (DECOUPLED, layout(pp=2)),
        (WHOLE_QKV, layout(tp=2, sequence_parallel=True)),
        (EXPERTS, layout(ep=2)),
        (EIGHT_BITS, layout(tp=2)),
        (EIGHT_BITS, layout()),
        (EIGHT_BITS, layout(zero_stage=1)),
        (EIGHT_BITS, layout(zero_stage=3)),
        (MUON, layout(zero_stage=1)),
        (DECOUPLED, layout(zero_stage=3)),
        (FACTORED, layout(tp=2, sequence_parallel=True)),
        ({**FACTORED, "untie_embeddings_and_output_weights": None}, layout(pp=2)),
        (FACTORED_EXPERTS, layout(ep=2)),
        (FACTORED, layout(zero_stage=1)),
        (FACTORED, layout(zero_stage=3)),
    ],
    4: [
        (MUON, layout(tp=2, zero_stage=1)),
        (EXPERTS, layout(ep=2, zero_stage=2)),
        (MUON, layout(tp=2)),
        (ONE_GROUP, layout(tp=4)),
        (DECOUPLED, layout(tp=2, pp=2)),
        (EXPERTS, layout(tp=2, ep=2, sequence_parallel=True)),
        (EIGHT_BITS, layout(tp=2, pp=2)),
        (FACTORED_BIASES, layout(tp=4)),
        (FACTORED_BIASES, layout(tp=2, zero_stage=1)),
        (FACTORED, layout(tp=2, pp=2)),
        (FACTORED_EXPERTS, layout(tp=2, ep=2)),
        (FACTORED_EXPERTS, layout(ep=2, zero_stage=2)),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_trains_what_one_process_trains(ranks: int) -> None:
    assert unequal(ranks, CASES[ranks], EQUAL) == {}


def test_each_setting_of_muon_changes_what_is_trained() -> None:
    """Otherwise several cases above would test the same thing."""
    one = expected(tuple(flags(**MUON)))
    for other in (WHOLE_QKV, {**MUON, "optimizer": "adam", "muon_nesterov": None}):
        assert worst(expected(tuple(flags(**other))), one) > SEEN


# planted bugs, and the layout in which each shows


def alone(parts: Parts) -> None:
    """Each rank orthogonalises its own part of a split matrix, as Megatron's blockwise mode does."""

    def apart(self: WholeMatrices, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._update(piece) for name, piece in pieces.items()}

    _patched(parts, apart)


def by_the_columns_of_the_file(parts: Parts) -> None:
    """Stacks the parts by rows, as for a plain column-parallel layer."""

    def stacked(self: WholeMatrices, name: str, piece: Tensor) -> Tensor:
        matrix = self._matrices[name]
        gathered = matrices.collectives.all_gather(self._grads.whole_of(name, piece), matrix.tp)
        return torch.cat([part.reshape(-1) for part in gathered]).view(matrix.spec.logical_shape)

    for muon in _muons(parts):
        muon._whole = stacked.__get__(muon)


def not_given_back(parts: Parts) -> None:
    """Ranks that did not compute a matrix update it with its plain momentum."""
    for muon in _muons(parts):
        muon._back = lambda _, result, piece: piece if result is None else result.view(piece.shape)


def momentum_of_another_matrix(parts: Parts) -> None:
    """Swaps two matrices of one shape where several ranks share the work."""
    call = WholeMatrices.__call__

    def exchanged(self: WholeMatrices, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        names = sorted((name for name in pieces if name.endswith("self_attention.dense.weight")), key=str)
        turned = dict(zip(names, [pieces[name] for name in reversed(names)], strict=True))
        return call(self, {**pieces, **turned})

    _patched(parts, exchanged)


def _muons(parts: Parts) -> list[WholeMatrices]:
    rules = parts.engine.optimizer._update._rules.values()  # type: ignore[attr-defined]
    return [rule.directions for rule in {id(rule): rule for rule in rules}.values() if isinstance(rule, Muon)]


def _patched(parts: Parts, call: Any) -> None:
    for muon in _muons(parts):
        muon.__class__ = type("Planted", (WholeMatrices,), {"__call__": call})


def _here(jobs: Sequence[Any]) -> list[Any]:
    return [replace(job, extent=replace(job.extent, axes=())) for job in jobs]


def statistics_of_the_shard(parts: Parts) -> None:
    """Each rank takes the means of its own part of the rows and columns."""

    def second_moments(self: Adafactor, jobs: Sequence[Any]) -> Any:
        own = Adafactor._second_moments(self, _here(jobs))[1]
        return Adafactor._second_moments(self, jobs)[0], own

    _adafactor(parts, _second_moments=second_moments)


def size_of_the_shard_of_a_weight(parts: Parts) -> None:
    def second_moments(self: Adafactor, jobs: Sequence[Any]) -> Any:
        sizes = [job.extent.square_sum(job.slot.tensor) for job in jobs]
        return sizes, Adafactor._second_moments(self, jobs)[1]

    _adafactor(parts, _second_moments=second_moments)


def size_of_the_shard_of_an_update(parts: Parts) -> None:
    _adafactor(parts, _lengths=lambda self, jobs, own: Adafactor._lengths(self, _here(jobs), own))


def replicas_counted_twice(parts: Parts) -> None:
    """Counts keys and values twice that two ranks hold."""
    for name, extent in (extents := _adafactor(parts).extents).items():
        extents[name] = replace(extent, counted=None)  # type: ignore[index]


def blocks_of_the_piece(parts: Parts) -> None:
    """Ranks with parts of a block take the largest of their own part."""
    rule = next(iter(parts.engine.optimizer._update._rules.values()))  # type: ignore[attr-defined]
    for name, own in rule.storage.in_blocks.items():
        rule.storage.in_blocks[name] = replace(own, axis=Axis.single("dp"))


def _adafactor(parts: Parts, **methods: Any) -> Adafactor:
    rule = next(iter(parts.engine.optimizer._update._rules.values()))  # type: ignore[attr-defined]
    assert isinstance(rule, Adafactor)
    object.__setattr__(rule, "__class__", type("Planted", (Adafactor,), methods))
    return rule


@pytest.mark.parametrize(
    ("plant", "case"),
    [
        (alone, (MUON, layout(tp=2))),
        (by_the_columns_of_the_file, (MUON, layout(tp=2))),
        (not_given_back, (MUON, layout())),
        (momentum_of_another_matrix, (MUON, layout())),
        (blocks_of_the_piece, (EIGHT_BITS, layout(zero_stage=1))),
        (statistics_of_the_shard, (FACTORED, layout(tp=2))),
        (statistics_of_the_shard, (FACTORED, layout(zero_stage=1))),
        (size_of_the_shard_of_a_weight, (FACTORED, layout(tp=2))),
        (size_of_the_shard_of_an_update, (FACTORED, layout(zero_stage=3))),
        (replicas_counted_twice, (FACTORED_BIASES, layout(tp=2))),
    ],
)
def test_planted_bugs_are_seen(plant: Any, case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    family, axes = case
    try:
        outcome = at_layout(2, flags(**family, **axes), change=plant)
    except AssertionError as error:
        assert "copies on rank" in str(error), error  # ranks that hold the same have come apart
        return
    assert worst(outcome, expected(tuple(flags(**family)))) > SEEN

"""Runs a step of every layout on a fake GPU: no host sync, no s x s tensor, no copied weight. `known_waits.py` names
and counts the exceptions.

The layouts are those of the equivalence suites, in bf16, with sequences so long that s x s is larger than all else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from megatron.config import RunConfig, parse_args
from megatron.model.moe import Experts
from megatron.training.assemble import Parts
from tests.cluster.fake_run import fake_parts
from tests.cluster.host_waits import Allocation, Watch
from tests.cluster.known_waits import KNOWN, OUTCOME, expected_waits
from tests.equivalence import test_context_parallel, test_data_parallel, test_model_parallel, test_moe, test_zero
from tests.equivalence.test_model_parallel import GPT2, SP, layout
from tests.helpers.runs import flags

SUITES = (test_data_parallel, test_model_parallel, test_context_parallel, test_moe, test_zero)
KINDS = ("num_experts", "window_size", "reset_attention_mask", "recompute_granularity", "moe_expert_capacity_factor")
LONG = 16384
SHORTER = 8192
"""Sequence length with ring attention, which has many blocks of scores."""
_BLOCK = 1024  # queries at a time, in ring attention
_ACROSS_LAYERS = {"zero_stage", "overlap_grad_reduce", "overlap_param_gather", "recompute_granularity", "cuda_graphs"}
"""Settings with which data passes between layers, or work begins in one layer and ends in another."""
_CUTS = {
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "moe_layer_freq"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
}
"""Settings that give each layer a kind or a place."""


@dataclass(frozen=True)
class Case:
    ranks: int
    rank: int
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}: {' '.join(self.argv)}"


@dataclass(frozen=True)
class Found:
    waits: Counter[str]
    expected: Counter[str]
    squares: Counter[str]
    copied: Allocation
    allowed_copies: int
    moved: int
    host_bytes: int


def settings(family: dict[str, Any], axes: dict[str, Any], ranks: int, micro_batches: int = 2) -> dict[str, Any]:
    """The suite's settings with few layers and few micro-batches (in a pipeline, one per stage)."""
    pp = axes.get("pipeline_model_parallel_size", 1)
    least = axes.get("microbatch_group_size_per_virtual_pipeline_stage", pp)
    model_parallel = pp * axes.get("tensor_model_parallel_size", 1) * axes.get("context_parallel_size", 1)
    ring = axes.get("context_parallel_size", 1) > 1 and axes.get("cp_comm_type", "p2p") == "p2p"
    seq = SHORTER if ring else LONG
    few = few_layers({*family, *axes}, pp, ring)
    each = max(1 if ring or "num_experts" in family else micro_batches, least)
    if "moe_ffn_hidden_size" in family:
        few["moe_ffn_hidden_size"] = 48  # the grouped product takes it, split over two ranks as well
    return {
        **family,
        **axes,
        **few,
        "bf16": True,
        "optimizer": "adam",
        "train_iters": 3,
        "seq_length": seq,
        "max_position_embeddings": seq,
        "micro_batch_size": 1,
        "global_batch_size": ranks // model_parallel * each,
    }


def few_layers(names: set[str], pp: int, ring: bool = False) -> dict[str, Any]:
    """One layer per stage, because the next does the same. Two if something passes between layers; the suite's number
    if its settings give each layer a kind or a place."""
    if names & _CUTS:
        return {}
    if (ring and pp == 1) or not names & _ACROSS_LAYERS:
        return {"num_layers": pp}
    return {"num_layers": 2} if pp == 1 else {}


@cache
def cases() -> tuple[Case, ...]:
    """Every layout of every suite, once with each kind of model, on the first and last stage of a pipeline. Only the
    data-parallel suite runs a second micro-batch: it adds the same everywhere."""
    kinds: dict[tuple[Any, ...], Case] = {}
    for suite in SUITES:
        micro_batches = 2 if suite is test_data_parallel else 1
        for ranks, pairs in suite.CASES.items():
            for family, axes in pairs:
                pp = axes.get("pipeline_model_parallel_size", 1)
                seen = str({**axes, "micro_batch_size": 1})  # which is every case's
                for rank in {0, ranks - 1} if pp > 1 else {ranks - 1}:
                    argv = tuple(flags(**settings(family, axes, ranks, micro_batches)))
                    kinds.setdefault((ranks, rank, seen, *(family.get(k) for k in KINDS)), Case(ranks, rank, argv))
    return tuple(kinds.values())


def longest_row(config: RunConfig, padded_vocabulary: int) -> int:
    """Largest number of elements per token in any one tensor."""
    model, moe = config.model, config.moe
    widths = [padded_vocabulary, 3 * model.hidden_size, 2 * model.ffn_size]
    if moe.num_experts:
        width = max(2 * (moe.moe_ffn_hidden_size or model.ffn_size), model.hidden_size)
        widths += [moe.num_experts, moe.moe_router_topk * width]
    return max(widths)


def largest_allowed(config: RunConfig, padded_vocabulary: int) -> int:
    """Bytes of an fp32 row for every token, or of a block of ring attention's scores if that is more."""
    seq, cp = config.data.seq_length, config.parallel.context_parallel_size
    allowed = 4 * seq * longest_row(config, padded_vocabulary)
    if cp > 1 and config.parallel.cp_attention == "p2p":
        chunk = seq // (2 * cp)
        allowed = max(allowed, 4 * config.model.num_attention_heads * min(_BLOCK, chunk) * chunk)
    assert allowed < seq * seq, "s x s would not be seen"
    return allowed


def copies_allowed(parts: Parts) -> int:
    """Bytes of weights that may be copied: grouped products put the matrices of a layer's experts side by side."""
    experts = [module for module in parts.engine.model.modules() if isinstance(module, Experts)]
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in experts]
    return max(sizes, default=0)


def watched(case: Case, plant: Callable[[Parts], None] | None = None) -> Found:
    config = parse_args(case.argv)
    with fake_parts(case.argv, case.rank, case.ranks) as parts:
        if plant is not None:
            plant(parts)
        padded = config.tokenizer.vocab_size
        assert padded is not None
        bound = largest_allowed(config, padded + 64)
        evaluated = config.evaluation.eval_iters
        with Watch(KNOWN, parts.engine.model.parameters(), bound) as watch:
            parts.trainer.fit(1)
            if evaluated:
                parts.evaluator.valid(parts.progress, "the end")
        micro_batches = config.training.global_batch_size // parts.engine.parallel.dp.size
        return Found(
            watch.waits,
            expected_waits(config, parts, micro_batches, evaluated * micro_batches),
            Counter(place.key for place, _ in watch.large),
            watch.most_copied,
            copies_allowed(parts),
            watch.moved,
            watch.host_bytes,
        )


@pytest.fixture(scope="module")
def found() -> dict[Case, Found | Exception]:
    results: dict[Case, Found | Exception] = {}
    for case in cases():
        try:
            results[case] = watched(case)
        except Exception as error:
            results[case] = error
    return results


FP16 = {"bf16": None, "fp16": True}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TP2, PP2 = layout(tp=2), layout(pp=2)
EP2 = {test_moe.EP: 2}
ZERO = {"zero_stage": 1, "overlap_grad_reduce": True}
LATE = {"overlap_param_gather": True}
INSTANCES = {"num_distributed_optimizer_instances": 2}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "evaluation": (GPT2, {**TP2, "eval_iters": 1}),
    "evaluation, first stage": (GPT2, {**PP2, "eval_iters": 1}),
    "evaluation of experts": (test_moe.MIXTRAL, {**EP2, "eval_iters": 1}),
    "fp16, dynamic scale": (GPT2, {**TP2, **FP16}),
    "fp16, pipeline": (GPT2, {**PP2, **FP16}),
    "fp16, experts": (test_moe.DEEPSEEK, {**EP2, **FP16}),
    "dropout": (GPT2, {**TP2, **SP, **DROPOUT}),
    "dropout, recomputed": (GPT2, {**TP2, **DROPOUT, "recompute_granularity": "full", "recompute_method": "uniform"}),
    "recomputed in part": (GPT2, {**TP2, **DROPOUT, "recompute_granularity": "selective"}),
    "ZeRO-1": (GPT2, ZERO),
    "ZeRO-1, fp16, sequences, late gathers": (GPT2, {**TP2, **SP, **ZERO, **LATE, **FP16, "eval_iters": 1}),
    "ZeRO-1, experts, late gathers": (test_moe.MIXTRAL, {**EP2, **ZERO, **LATE}),
    "ZeRO-1, several instances, late gathers": (GPT2, {**ZERO, **LATE, **INSTANCES, "ddp_bucket_size": 8000}),
    "ZeRO-1, several instances, experts": (test_moe.MIXTRAL, {**EP2, **ZERO, **INSTANCES}),
    "ZeRO-3, several instances": (GPT2, {**TP2, "zero_stage": 3, **INSTANCES}),
    "ZeRO-2": (GPT2, {**TP2, **SP, "zero_stage": 2, "eval_iters": 1}),
    "ZeRO-3, fp16, recomputed": (
        GPT2,
        {**TP2, **FP16, "zero_stage": 3, "recompute_granularity": "full", "recompute_method": "uniform"},
    ),
    "logged": (GPT2, {**TP2, "log_params_norm": True, "log_num_zeros_in_grad": True}),
    "logged, of all ranks": (GPT2, {**TP2, "timing_log_level": 2, "log_memory_interval": 1}),
    "Muon": (GPT2, {**TP2, "optimizer": "muon"}),
    "Muon, ZeRO-1": (GPT2, {**ZERO, "optimizer": "muon"}),
    "Adam of 8 bits": (GPT2, {**TP2, "optimizer": "adam8bit"}),
    "graphs": (GPT2, {"cuda_graphs": True}),
}


def variant(name: str) -> Found:
    family, axes = VARIANTS[name]
    ranks = 1 if "cuda_graphs" in axes else 4 if "zero_stage" in axes else 2
    if "num_distributed_optimizer_instances" in axes:
        ranks *= axes.get("tensor_model_parallel_size", 1)
    return watched(Case(ranks, 0, tuple(flags(**{**settings(family, axes, ranks), **axes}))))


@pytest.fixture(scope="module")
def variants() -> dict[str, Found]:
    return {name: variant(name) for name in VARIANTS}


def test_no_variant_of_a_step_waits_or_copies(variants: dict[str, Found]) -> None:
    """Covers evaluation, fp16 with a dynamic loss scale, dropout, recomputation, sharded state and graphs."""
    waits = {name: (one.waits, one.expected) for name, one in variants.items() if one.waits != one.expected}
    rest = {name: one for name, one in variants.items() if one.squares or one.copied.size > one.allowed_copies}
    assert not waits and not rest, (waits, rest)


def of(found: dict[Case, Found | Exception]) -> Iterator[tuple[Case, Found]]:
    for case, result in found.items():
        if isinstance(result, Exception):
            raise AssertionError(str(case)) from result
        yield case, result


def test_the_host_waits_only_where_it_is_known(found: dict[Case, Found | Exception]) -> None:
    wrong = {str(case): (r.waits, r.expected) for case, r in of(found) if r.waits != r.expected}
    assert not wrong, wrong


def test_no_tensor_is_s_times_s(found: dict[Case, Found | Exception]) -> None:
    wrong = {str(case): r.squares for case, r in of(found) if r.squares}
    assert not wrong, wrong


def test_no_weight_is_copied_but_those_of_a_layers_experts(found: dict[Case, Found | Exception]) -> None:
    wrong = {str(case): (r.copied, r.allowed_copies) for case, r in of(found) if r.copied.size > r.allowed_copies}
    assert not wrong, wrong


def test_every_known_exception_still_occurs(found: dict[Case, Found | Exception], variants: dict[str, Found]) -> None:
    waits = set().union(*(result.waits for _, result in of(found)), *(one.waits for one in variants.values()))
    assert waits == {known.place for known in KNOWN}


TENSORS = flags(**settings(GPT2, layout(tp=2), 2))


def test_twice_the_sequence_moves_at_most_twice_the_bytes() -> None:
    """Attention kernels re-read keys and values; attention is counted as reading each once."""
    for axes in (layout(tp=2, **SP), layout(pp=2), {"context_parallel_size": 2, "cp_comm_type": "a2a"}):
        short, long = (
            {**settings(GPT2, axes, 2), "seq_length": s, "max_position_embeddings": LONG} for s in (4096, 8192)
        )
        once, twice = (watched(Case(2, 1, tuple(flags(**one)))) for one in (short, long))
        assert once.moved < twice.moved <= 2 * once.moved, axes


def test_only_the_batch_comes_from_the_host_and_only_the_outcome_goes_there() -> None:
    """Copied in: tokens, labels, positions (8 bytes each), loss weights (4), the sample's number; out: five numbers."""
    found = watched(Case(2, 1, tuple(TENSORS)))
    assert found.host_bytes == 2 * (LONG * (8 + 8 + 8 + 4) + 8) + 5 * 8


def test_the_exchange_of_reasons_to_stop_is_read_a_step_later() -> None:
    """The host reads two outcomes and, after the second, what the ranks exchanged after the first: one had a signal."""
    argv = [*TENSORS, "--exit-signal-handler", "--exit-duration-in-mins", "1000"]
    with fake_parts(argv, 1, 2) as parts, Watch(KNOWN) as watch:
        reason = parts.trainer.fit()
    assert (parts.progress.iteration, reason.kind, watch.waits) == (2, "signal", {OUTCOME: 3})

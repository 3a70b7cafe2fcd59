"""A pipeline stage reads only what it uses: bytes read from the data files are counted on every rank."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.data.indexed.dataset import IndexedDataset
from megatron.distributed.parallel_state import Axis
from megatron.model.gpt import GPT
from megatron.parallelize import parallel as build
from megatron.training.assemble import Parts
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.layouts import at_layout, expected, unequal, worst
from tests.helpers.runs import LLAMA_SHAPE, flags, make_parts
from tests.unit.data.oracle import random_documents, write_dataset

SEQ, SAMPLES, STEPS = 16, 8, 2
WHOLE = SAMPLES * (SEQ + 1) * 2
"""Bytes of a step's samples, each one token longer than the inputs, with two bytes per token."""
RESETS = {"reset_attention_mask": True, "reset_position_ids": True}


def settings(prefix: str, **changes: Any) -> list[str]:
    return flags(
        **{
            "mock_data": None,
            "data_path": prefix,
            "tokenizer_type": "NullTokenizer",
            "split": "1,0,0",
            "num_layers": 4,
            "pipeline_model_parallel_size": 4,
            "micro_batch_size": 1,
            "global_batch_size": SAMPLES,
            "train_iters": STEPS,
            **changes,
        }
    )


def read_in_training(parts: Parts) -> tuple[int, set[str]]:
    """(bytes of .bin files that this rank read in all steps, fields of its batches)."""
    get, fields = IndexedDataset.get, set[str]()
    read = [0]

    def counted(self: IndexedDataset, *which: int) -> Any:
        found = get(self, *which)
        read[0] += found.nbytes
        return found

    IndexedDataset.get = counted  # type: ignore[method-assign]
    try:
        trainer = parts.trainer
        trainer.train_batches = (fields.update(batch) or batch for batch in trainer.train_batches)  # type: ignore[func-returns-value]
        trainer.fit()
    finally:
        IndexedDataset.get = get  # type: ignore[method-assign]
    return read[0], fields


def rank_reads(rank: int, size: int, argv: list[str]) -> tuple[int, set[str]]:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=size)
    with parts:
        return read_in_training(parts)


def reads(tmp_path: Path, **changes: Any) -> list[tuple[int, set[str]]]:
    documents = [[*document, 97] for document in random_documents(0, 60, 30, vocab=97)]
    prefix = write_dataset(tmp_path / "corpus", documents)
    return run_ranks(4, rank_reads, 4, settings(prefix, **changes))


@pytest.mark.parametrize("virtual", [None, 1], ids=["1f1b", "interleaved"])
def test_middle_stages_read_nothing(tmp_path: Path, virtual: int | None) -> None:
    first, *middle, last = reads(tmp_path, num_layers=8, num_layers_per_virtual_pipeline_stage=virtual)
    assert first == (STEPS * WHOLE, {"tokens", "position_ids", "sample_ids"})
    assert middle == [(0, {"position_ids", "sample_ids"})] * 2
    assert last == (STEPS * WHOLE, {"tokens", "labels", "loss_mask", "position_ids", "sample_ids"})


def test_documents_are_found_in_the_tokens_so_every_stage_reads_them(tmp_path: Path) -> None:
    first, *middle, last = reads(tmp_path, **RESETS)
    usual = {"position_ids", "document_ids", "sample_ids"}
    assert first == (STEPS * WHOLE, usual | {"tokens"})
    assert middle == [(STEPS * WHOLE, usual)] * 2
    assert last == (STEPS * WHOLE, usual | {"tokens", "labels", "loss_mask"})


def test_masked_ends_of_documents_concern_the_loss_alone(tmp_path: Path) -> None:
    assert [read for read, _ in reads(tmp_path, eod_mask_loss=True)] == [STEPS * WHOLE, 0, 0, STEPS * WHOLE]


ROUTER_LOSSES = {
    "num_experts": 4,
    "disable_bias_linear": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
}


@pytest.mark.parametrize("masked", [False, True])
def test_routers_with_losses_need_the_loss_mask(tmp_path: Path, masked: bool) -> None:
    found = reads(tmp_path, **ROUTER_LOSSES, eod_mask_loss=masked)
    middle = STEPS * WHOLE if masked else 0
    assert [read for read, _ in found] == [STEPS * WHOLE, middle, middle, STEPS * WHOLE]
    assert all("loss_mask" in fields for _, fields in found)


# Without the other fields every stage trains what one process trains.

DOCUMENTS = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 96,
    "micro_batch_size": 1,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "optimizer": "sgd",
    "num_layers": 4,
    "eod_mask_loss": True,
    **RESETS,
}
ROPE = {**DOCUMENTS, **LLAMA_SHAPE, "num_layers": 8}
EXPERTS = {**DOCUMENTS, **LLAMA_SHAPE, **ROUTER_LOSSES}
FOUR = {"pipeline_model_parallel_size": 4}
CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    4: [
        (DOCUMENTS, FOUR),
        (ROPE, {**FOUR, "num_layers_per_virtual_pipeline_stage": 1}),
        (EXPERTS, {**FOUR, "pipeline_schedule": "zero-bubble"}),
    ],
    6: [({**ROPE, "num_layers": 3}, {"pipeline_model_parallel_size": 3, "context_parallel_size": 2})],
}


@pytest.mark.parametrize("ranks", CASES)
def test_every_stage_trains_what_one_process_trains(ranks: int) -> None:
    assert not unequal(ranks, CASES[ranks], 1e-10)


# What these tests are worth: a field is forgotten.


@pytest.mark.parametrize(("family", "field"), [(DOCUMENTS, "document_ids"), (EXPERTS, "loss_mask")])
def test_planted_a_field_that_a_middle_stage_does_not_get(
    family: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(field, monkeypatch)
    assert worst(at_layout(4, flags(**family, **FOUR)), expected(tuple(flags(**family)))) > 1e-6


def test_a_first_stage_without_tokens_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    forget("tokens", monkeypatch)
    with pytest.raises(RankFailed, match="the stage with the embedding needs tokens"):
        at_layout(4, flags(**DOCUMENTS, **FOUR))


def forget(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields_of = build.stage_fields

    def forgetful(part: GPT, pp: Axis) -> Set[str] | None:
        fields = fields_of(part, pp)
        return None if fields is None else fields - {field}

    monkeypatch.setattr(build, "stage_fields", forgetful)

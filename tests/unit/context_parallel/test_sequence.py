"""The balanced split of a sequence: each token has one place, and all ranks have equal work."""

from __future__ import annotations

import pytest
import torch

from megatron.context_parallel.sequence import (
    SharedSequence,
    by_rank,
    chunks_of,
    in_sequence,
    own_part,
    own_positions,
    slice_batch,
)
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError, DataError
from megatron.model.attention import SequenceView
from megatron.ops.documents import Documents
from megatron.parallelize.factory import CONTEXT_ATTENTION


def axis(rank: int, size: int) -> Axis:
    return Axis("cp", rank, size, tuple(range(size)))


def test_the_cut_of_four_ranks() -> None:
    sequence = torch.arange(16)
    parts = [own_part(sequence, axis(rank, 4), 0).tolist() for rank in range(4)]
    assert parts == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_has_the_same_number_of_pairs_to_look_at(size: int) -> None:
    visible = [sum(range(1, 2 * size + 1)[chunk] for chunk in chunks_of(rank, size)) for rank in range(size)]
    assert len(set(visible)) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_cut_and_join(size: int, dim: int) -> None:
    whole = torch.randn(24, 24, 24)
    parts = [own_part(whole, axis(rank, size), dim) for rank in range(size)]
    laid_out = torch.cat(parts, dim)
    if size > 1:
        assert torch.equal(in_sequence(laid_out, size, dim), whole)
        assert torch.equal(by_rank(whole, size, dim), laid_out)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_positions_are_those_of_the_tokens(size: int) -> None:
    for rank in range(size):
        cp = axis(rank, size)
        positions = own_positions(24 // size, cp, torch.device("cpu"))
        assert torch.equal(positions, own_part(torch.arange(24), cp, 0))


def test_a_batch_is_cut_along_the_sequence_and_nowhere_else() -> None:
    cp = axis(1, 2)
    tokens = torch.arange(16).view(2, 8)
    batch = {
        "tokens": tokens,
        "labels": tokens + 1,
        "weights": torch.randn(2, 8, 3),
        "document_ids": Documents.of_ids(tokens // 4),
        "sample_ids": torch.tensor([5, 6]),
        "note": "text",
    }
    cut = slice_batch(batch, cp)
    assert cut["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(cut["labels"], cut["tokens"] + 1)
    assert torch.equal(cut["weights"], own_part(batch["weights"], cp, 1))
    assert cut["document_ids"] is batch["document_ids"]  # attention asks it about everybody's tokens
    assert cut["sample_ids"] is batch["sample_ids"] and cut["note"] == "text"


def test_one_rank_keeps_the_batch_itself() -> None:
    batch = {"tokens": torch.arange(8).view(1, 8)}
    assert slice_batch(batch, Axis.single("cp")) is batch


def test_a_sequence_that_does_not_divide_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="10 tokens cannot be cut into 4 chunks"):
        own_part(torch.arange(10), axis(0, 2), 0)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"tokens": torch.zeros(1, 10)},
            "10 tokens are not divisible into 4 equal chunks; use samples of 8 or 12 tokens",
        ),
        ({"x": torch.zeros(1, 8), "y": 3}, "a batch with 'tokens' .* has x, y; use --context-parallel-size 1"),
    ],
)
def test_data_that_cannot_be_cut_is_refused(batch: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match="^--context-parallel-size 2: .*" + words):
        slice_batch(batch, axis(0, 2))


@pytest.mark.parametrize("kind", CONTEXT_ATTENTION)
@pytest.mark.parametrize(("rows", "seq"), [(2, 8), (1, 16), (4, 8)])
def test_documents_of_another_shape_are_rejected(kind: str, rows: int, seq: int) -> None:
    """A rank that has 8 of 16 tokens of 2 rows needs the documents of all 16."""
    view = SharedSequence(axis(0, 2), CONTEXT_ATTENTION[kind])
    device = torch.device("cpu")
    whole = Documents.of_starts(torch.ones(2, 16, dtype=torch.bool))
    view.visible(torch.Size((2, 8)), window=None, documents=whole, device=device)
    other = Documents.of_starts(torch.ones(rows, seq, dtype=torch.bool))
    message = f"document_ids of {rows} rows of {seq} tokens for a batch of 2 rows of 16 tokens; give the documents"
    with pytest.raises(DataError, match=message):
        view.visible(torch.Size((2, 8)), window=None, documents=other, device=device)


def test_documents_of_another_shape_are_rejected_without_context_parallelism() -> None:
    other = Documents.of_starts(torch.ones(2, 16, dtype=torch.bool))
    with pytest.raises(DataError, match="document_ids of 2 rows of 16 tokens for a batch of 2 rows of 8 tokens"):
        SequenceView().visible(torch.Size((2, 8)), window=None, documents=other, device=torch.device("cpu"))

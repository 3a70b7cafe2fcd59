from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.masks import MaskConfig, document_starts, loss_mask, position_ids
from megatron.errors import ConfigError
from megatron.ops.documents import Documents

EOD = 0


def megatron(tokens: list[int], reset_positions: bool) -> tuple[list[int], np.ndarray]:
    """Positions, and pairs (query, key) that may see each other, from the format notes."""
    length = len(tokens)
    positions = np.arange(length)
    visible = np.tril(np.ones((length, length), dtype=bool))
    previous = 0
    for i in [i for i, token in enumerate(tokens) if token == EOD]:
        visible[i + 1 :, : i + 1] = False
        if reset_positions:
            positions[i + 1 :] -= i + 1 - previous
            previous = i + 1
    return positions.tolist(), visible


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3))
def test_equal_to_megatron(rows: list[list[int]]) -> None:
    tokens = np.array(rows)
    masks = MaskConfig(eod_id=EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    starts = document_starts(tokens, masks)
    assert starts is not None
    documents = Documents.of_starts(torch.from_numpy(starts))
    for row, text in enumerate(rows):
        positions, visible = megatron(text, reset_positions=True)
        assert position_ids(tokens, masks)[row].tolist() == positions
        assert np.array_equal(documents.mask(len(text), None)[row, 0].numpy(), visible)
        assert loss_mask(tokens, masks)[row].tolist() == [0.0 if token == EOD else 1.0 for token in text]


def test_nothing_asked() -> None:
    tokens = np.array([[1, EOD, 2], [EOD, EOD, 3]])
    masks = MaskConfig(eod_id=EOD)
    assert document_starts(tokens, masks) is None
    assert position_ids(tokens, masks).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert loss_mask(tokens, masks).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert (loss_mask(tokens, masks).dtype, position_ids(tokens, masks).dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_without_an_end_of_document_id(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: the tokenizer has no"):
        MaskConfig(**{name: True})  # type: ignore[arg-type]


def test_a_batch_of_one_may_be_written_to() -> None:
    positions = position_ids(np.zeros((1, 4), dtype=np.int64), MaskConfig())  # torch warns about a read-only array
    assert positions.flags.writeable and positions.tolist() == [[0, 1, 2, 3]]

"""Cross-entropy of csrc/ beyond the common comparison: invalid labels, far offsets, planted bugs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import ones

from megatron.ops.logits import TORCH_LOGITS
from tests.helpers.declared import Refused
from tests.helpers.kernels import backend
from tests.helpers.planted import Mistake

LABELS = torch.zeros(3, dtype=torch.int64)
REFUSED: Refused = {
    "cross_entropy": [
        (
            (ones(3, 8), LABELS.int()),
            "logits float32 (3, 8) with labels int32 (3,): the kernel needs [tokens, vocabulary]",
        ),
        ((ones(3, 8), LABELS.to("meta")), "tensors of cpu and meta: the kernel needs one device"),
    ],
}


@pytest.mark.parametrize("label", [-100, -1, 7])
def test_a_label_that_does_not_exist_is_named(label: int) -> None:
    ops, logits, labels = backend("cpu").ops, torch.randn(2, 7), torch.tensor([3, label])
    for call in (
        lambda: ops.xent_forward(logits, labels),
        lambda: ops.xent_in_place_(logits.clone(), labels, 7),
        lambda: ops.xent_statistics(logits, labels, 0, 7, 7),
    ):
        with pytest.raises(RuntimeError, match=f"label {label} is not in the vocabulary of 7"):
            call()
    with pytest.raises(IndexError, match="for a vocabulary of 7 entries"):
        TORCH_LOGITS.statistics(logits, labels, 0, 7, 7)


@pytest.mark.parametrize("label", [-100, -1, 7])
def test_on_a_device_it_makes_the_loss_nan(label: int) -> None:
    ops, logits, labels = backend("emulated").ops, torch.randn(2, 7), torch.tensor([3, label])
    assert ops.xent_forward(logits, labels)[0].isnan().tolist() == [False, True]
    assert ops.xent_in_place_(logits.clone(), labels, 7).isnan().tolist() == [False, True]
    assert ops.xent_statistics(logits, labels, 0, 7, 7)[2].isnan().tolist() == [False, True]


@pytest.mark.parametrize("columns", [0, 3])
def test_a_rank_that_holds_no_label_and_perhaps_no_column(columns: int) -> None:
    logits, labels = torch.randn(4, columns), torch.tensor([0, 1, 2, 3])
    ours = backend("cpu").ops.xent_statistics(logits, labels, 90, columns, 100)
    torch.testing.assert_close(ours, TORCH_LOGITS.statistics(logits, labels, 90, columns, 100))
    assert (ours[2] == 0).all()
    assert columns or ((ours[0] == -torch.inf).all() and (ours[1] == 0).all())


def test_rows_that_lie_beyond_32_bits() -> None:
    """Two rows, 2^31 numbers apart, in memory that is reserved but never touched."""
    storage = torch.empty((1 << 31) + 8, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 8), (1 << 31, 1))
    logits.copy_(torch.arange(16).view(2, 8) * 0.5)
    labels, expected = torch.tensor([1, 7]), logits.clone()
    ops = backend("cpu").ops
    assert torch.equal(ops.xent_forward(logits, labels), ops.xent_forward(expected, labels))
    assert torch.equal(ops.xent_in_place_(logits, labels, 8), ops.xent_in_place_(expected, labels, 8))
    assert torch.equal(logits, expected)


def test_what_does_not_fit_is_refused() -> None:
    ops, logits, labels = backend("cpu").ops, torch.randn(2, 7), torch.tensor([1, 2])
    for arguments, message in (
        ((logits.t(), labels), "rows of neighbouring numbers"),
        ((logits.double(), labels), "only float32, bfloat16 and float16"),
        ((logits, labels[:1]), "one int64 for every row"),
        ((logits, labels.int()), "one int64 for every row"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.xent_forward(*arguments)
    with pytest.raises(RuntimeError, match="not 8 columns"):
        ops.xent_in_place_(logits, labels, 8)


MISTAKES = {
    "target subtracted twice": Mistake(
        "cross_entropy/cpu.cpp",
        "(exp_of_difference<T>(target - shift) - 1.0f)",
        "(exp_of_difference<T>(target - shift) - 2.0f)",
        "xent_split",
    ),
    "target read after it was overwritten": Mistake(
        "cross_entropy/cpu.cpp",
        "(target - shift) * factor - 1.0f",
        "(load(x[label]) - shift) * factor - 1.0f",
        "xent_in_place",
    ),
    "wrong offset in the vocabulary": Mistake(
        "cross_entropy/cpu.cpp", "a.labels[row] - a.first;", "a.labels[row];", "xent_split"
    ),
    "last chunk left out": Mistake(
        "cross_entropy/cpu.cpp", "begin + kChunk : count,", "begin + kChunk : begin,", "cross_entropy"
    ),
    "padding keeps its logits": Mistake(
        "cross_entropy/cpu.cpp", "size_t(a.width - a.columns)", "size_t(0)", "xent_in_place"
    ),
    "CUDA: target subtracted twice": Mistake(
        "cross_entropy/cuda.cu", "probability - 1.0f", "probability - 2.0f", "xent_split"
    ),
    "CUDA: wrong offset in the vocabulary": Mistake("cross_entropy/cuda.cu", "label - first;", "label;", "xent_split"),
    "CUDA: ends of the row left out": Mistake(
        "cross_entropy/cuda.cu", "ends = head + columns - tail", "ends = head", "cross_entropy"
    ),
    "CUDA: a sum not rescaled": Mistake(
        "common/online_softmax.h", "r.sum * exp_for<T>(r.peak - shift);", "r.sum;", "cross_entropy"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_bugs_are_seen(tmp_path: Path, name: str) -> None:
    MISTAKES[name].must_be_seen(tmp_path)

"""Softmax of csrc/ beyond the common comparison: rejected mask layouts, memory, planted bugs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import ones

from megatron.ops import attention, resolve
from tests.helpers.declared import Refused
from tests.helpers.kernels import backend
from tests.helpers.planted import Mistake

REFUSED: Refused = {
    "softmax": [
        ((ones(2, 4), ones(2, 4), 1.0), "a mask float32 (2, 4): the kernel needs a bool mask that broadcasts to them"),
        (
            (ones(2, 4), ones(3, 4, dtype=torch.bool), 1.0),
            "scores float32 (2, 4) with a mask bool (3, 4): the kernel needs a bool",
        ),
        ((ones(4), None, 1.0), "scores float32 (4,): the kernel needs [..., queries, keys]"),
    ],
}


def test_what_does_not_fit_is_refused() -> None:
    ops, scores = backend("cpu").ops, torch.randn(2, 3, 4, 5)
    for arguments, message in (
        ((scores.transpose(0, 1), None), "not contiguous"),
        ((scores[0], None), r"not \[outer, inner, queries, keys\]"),
        ((scores, torch.ones(2, 3, 4, 1, dtype=torch.bool)), "value for every key"),
        ((scores, torch.ones(2, 2, 4, 5, dtype=torch.bool)), "does not fit dimension 1"),
        ((scores, torch.ones(2, 3, 4, 5)), "4 dimensions of bool"),
        ((scores.double(), None), "only float32, bfloat16 and float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.softmax_forward(*arguments, 5, 1.0)


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_attention_takes_it(causal: bool) -> None:
    backend("cpu")
    query, key, value = (torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 9, 9) < 0.7
    mask |= torch.eye(9, dtype=torch.bool)
    chosen = resolve("auto", "cpu", attention="local").attention
    options = {"mask": mask, "causal": causal, "scale": 0.3, "layer_scaling": 2}
    ours, plain = chosen(query, key, value, **options), attention.attention(query, key, value, **options)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    for got, want in zip(*(torch.autograd.grad(out.sum(), (query, key, value)) for out in (ours, plain)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


MISTAKES = {
    "causal off by one": Mistake(
        "softmax/math.h", "row % queries + diagonal + 1", "row % queries + diagonal", "softmax", on_cpu=True
    ),
    "scale missing backward": Mistake("softmax/cpu.cpp", "(load(out[i]) * a.scale)", "load(out[i])", "softmax"),
    "mask of the first sample for all": Mistake(
        "softmax/math.h", " + block / inner * mask_outer", "", "softmax", on_cpu=True
    ),
    "hidden keys keep their numbers": Mistake("softmax/cpu.cpp", "out[i] = store<T>(0.0f)", "", "softmax"),
    "CUDA: causal off by one": Mistake(
        "softmax/math.h", "row % queries + diagonal + 1", "row % queries + diagonal + 2", "softmax"
    ),
    "CUDA: scale missing backward": Mistake(
        "softmax/cuda.cu", "(load(out[key]) * a.scale)", "load(out[key])", "softmax"
    ),
    "CUDA: only the first turn of the threads": Mistake(
        "softmax/cuda.cu", "key < count; key += kThreads)", "key < count; key += a.keys)", "softmax"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_bugs_are_seen(tmp_path: Path, name: str) -> None:
    MISTAKES[name].must_be_seen(tmp_path)

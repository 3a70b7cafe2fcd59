"""Masked documents are isolated: no bit of a logit or gradient depends on another document.

Covers every core attention that the settings can choose, so a new one is tested automatically.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import RecomputeConfig
from megatron.config.run import settings_by_name
from megatron.model import GPT, initialise
from megatron.ops import Kernels, resolve
from tests.unit.model.helpers import GPT2, LLAMA, VOCAB, config, tokens

BACKENDS = settings_by_name()["attention_backend"].flag.choices
LONG, SHORT = 600, 100  # above and below the lengths up to which the CPU's own attention works
RECOMPUTED = {
    "kept": None,
    "full": RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "selective": RecomputeConfig(recompute_granularity="selective"),
}
ROPE_WINDOW = LLAMA | {"window_size": (40, 0)}
MQA = LLAMA | {"num_query_groups": 1}
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "window": ROPE_WINDOW, "mqa": MQA}


def model(
    family: dict[str, Any], kernels: Kernels, dtype: torch.dtype, recompute: RecomputeConfig | None = None
) -> GPT:
    shape = config(**family, num_layers=2, max_position_embeddings=LONG)
    gpt = GPT(shape, vocab_size=VOCAB, kernels=kernels, recompute=recompute)
    initialise(gpt, 7)
    return gpt.to(dtype)


def documents(seq: int) -> tuple[Tensor, Tensor]:
    """Three documents in one row, a boundary inside an attention block in the other; positions restart at each."""
    edges = [[0, 33, 70, seq], [0, 1, 2, seq]]
    ids = torch.stack([torch.bucketize(torch.arange(seq), torch.tensor(row[1:]), right=True) for row in edges])
    starts = torch.tensor(edges).gather(1, ids)
    return ids, torch.arange(seq) - starts


def leaks(gpt: GPT, seq: int, edited: int) -> list[str]:
    """Other documents whose logits change when document `edited` of each row is edited."""
    ids, positions = documents(seq)
    first, second = tokens(seq=seq), tokens(seq=seq)
    second[ids == edited] = (second[ids == edited] + 5) % VOCAB
    one = gpt(first, position_ids=positions, document_ids=ids)
    other = gpt(second, position_ids=positions, document_ids=ids)
    assert not torch.equal(one[ids == edited], other[ids == edited]), "the edit does something"
    return [f"document {n}" for n in range(3) if n != edited and not torch.equal(one[ids == n], other[ids == n])]


@pytest.mark.parametrize("seq", [SHORT, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_editing_a_document_moves_no_bit_of_another(backend: str, family: str, dtype: torch.dtype, seq: int) -> None:
    gpt = model(FAMILIES[family], resolve("auto", "cpu", attention=backend), dtype)
    with torch.no_grad():
        assert [leaks(gpt, seq, edited) for edited in range(3)] == [[], [], []]


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_crosses_a_border(backend: str, recompute: str) -> None:
    """A loss on one document gives a gradient of exactly 0 to token embeddings that only the others use."""
    gpt = model(LLAMA, resolve("auto", "cpu", attention=backend), torch.float32, RECOMPUTED[recompute]).train()
    ids, positions = documents(SHORT)
    text = tokens(seq=SHORT) % 20 + 20 * ids  # each document has words of its own
    assert leaks(gpt, SHORT, 0) == []
    for counted in range(3):
        gpt.zero_grad()
        losses = gpt(text, position_ids=positions, document_ids=ids, labels=text.roll(-1, dims=1))
        losses[ids == counted].sum().backward()
        assert gpt.embedding is not None and gpt.embedding.word_embeddings.weight.grad is not None
        moved = gpt.embedding.word_embeddings.weight.grad.abs().sum(dim=1) > 0
        words = set(torch.nonzero(moved).flatten().tolist())
        assert words and words <= set(range(20 * counted, 20 * counted + 20))


def _as_one_document(kernels: Kernels, *operands: Tensor, documents: Any, left: Any, **options: Any) -> Tensor:
    return kernels.attention(*operands, mask=None, causal=True, **options)


@pytest.mark.parametrize("seq", [SHORT, LONG])
def test_an_attention_that_drops_the_documents_is_seen(seq: int) -> None:
    """Planted bug: drops the documents, as a fused path once dropped its mask."""
    honest = resolve("auto", "cpu")
    careless = dataclasses.replace(honest, packed_attention=functools.partial(_as_one_document, honest))
    with torch.no_grad():
        assert leaks(model(GPT2, careless, torch.float32), seq, 0) == ["document 1", "document 2"]

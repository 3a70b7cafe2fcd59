from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.attention_mask import attention_mask
from megatron.model.kv_cache import KVCache
from tests.unit.model.helpers import GPT2, LLAMA, VOCAB, build, config, tokens

WINDOWED = LLAMA | {"window_size": (6, 0)}
YARN = LLAMA | {"position_embedding_type": "yarn", "yarn_factor": 4.0, "yarn_original_max_position_embeddings": 16}
FAMILIES = pytest.mark.parametrize("family", [GPT2, LLAMA, WINDOWED, YARN], ids=["gpt2", "llama", "windowed", "yarn"])


@FAMILIES
def test_causality(family: dict[str, Any]) -> None:
    model = build(config(**family))
    first, changed = tokens(), tokens()
    changed[:, 13] = (changed[:, 13] + 1) % VOCAB
    one, two = model(first), model(changed)
    assert torch.equal(one[:, :13], two[:, :13])
    assert not torch.equal(one[:, 13], two[:, 13])


@pytest.mark.parametrize("window", [(3, 0), (0, 0), (-1, 0), (100, 0)])
def test_window(window: tuple[int, int]) -> None:
    """One layer: position i depends on i - left .. i only."""
    model = build(config(num_layers=1, **GPT2, window_size=window))
    base = model(tokens())
    changed = tokens()
    changed[:, 10] = (changed[:, 10] + 1) % VOCAB
    moved = (model(changed) != base).any(dim=-1).all(dim=0).nonzero().flatten().tolist()
    last = 23 if window[0] < 0 else min(23, 10 + window[0])
    assert moved == list(range(10, last + 1))


@pytest.mark.parametrize("kernels", ["auto", "ref"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FAMILIES
def test_documents_are_isolated_bit_for_bit(family: dict[str, Any], dtype: torch.dtype, kernels: str) -> None:
    model = build(config(**family, num_layers=2, max_position_embeddings=100), dtype=dtype, kernels=kernels)
    documents = torch.tensor([[0] * 9 + [1] * 91, [0] * 1 + [1] * 70 + [2] * 29])
    base = model(tokens(seq=100), document_ids=documents)
    changed = tokens(seq=100)
    changed[documents == 0] = (changed[documents == 0] + 5) % VOCAB
    after = model(changed, document_ids=documents)
    assert torch.equal(base[documents != 0], after[documents != 0])
    assert not torch.equal(base[documents == 0], after[documents == 0])
    leaking = model(tokens(seq=100)), model(changed)  # without the mask the test must see the leak
    assert not torch.equal(leaking[0][documents != 0], leaking[1][documents != 0])


def test_a_document_in_a_pack_equals_the_document_alone() -> None:
    for family in (GPT2, LLAMA):
        model = build(config(**family), dtype=torch.float64)
        documents = torch.tensor([[0] * 9 + [1] * 15])
        positions = torch.cat((torch.arange(9), torch.arange(15))).unsqueeze(0)
        packed = model(tokens(1), document_ids=documents, position_ids=positions)
        alone = model(tokens(1)[:, 9:])
        torch.testing.assert_close(packed[:, 9:], alone, rtol=1e-10, atol=1e-12)


def test_no_mask_is_made_where_the_triangle_says_it_all() -> None:
    options = {"document_ids": None, "device": torch.device("cpu")}
    assert attention_mask(8, 8, window=None, **options) == (None, True)
    assert attention_mask(8, 8, window=(7, 0), **options) == (None, True)
    assert attention_mask(1, 8, window=None, **options) == (None, False)
    mask, causal = attention_mask(2, 5, window=(1, 0), **options)
    assert not causal and mask is not None
    assert mask[0, 0].int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("kernels", ["auto", "ref"])
@FAMILIES
def test_cached_generation_equals_the_full_pass(family: dict[str, Any], kernels: str) -> None:
    model = build(config(**family), dtype=torch.float64, kernels=kernels).eval()
    with torch.no_grad():
        full = model(tokens())
        for sizes in ([24], [10, 14], [5, 1, 1, 1, 16], [1] * 24):
            cache = model.make_cache(batch=2, max_length=30)
            parts = [model(part, cache=cache) for part in tokens().split(sizes, dim=1)]
            assert cache.length == 24
            torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-10, atol=1e-12)


def test_a_full_cache_is_refused() -> None:
    cache = KVCache([0], batch=1, groups=1, max_length=4, head_dim=2, dtype=torch.float32)
    with pytest.raises(AssertionError, match="a KV cache of 4 tokens cannot hold 5"):
        cache.begin(5)

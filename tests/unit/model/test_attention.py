from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.attention_mask import Visible, documents_of, look_back
from megatron.model.kv_cache import KVCache
from megatron.ops.documents import Documents
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


def test_plain_causal_attention_runs_where_it_hides_the_same_keys() -> None:
    assert not Visible(left=look_back(None)).is_packed(8)
    assert not Visible(left=look_back((7, 0))).is_packed(8)
    assert not Visible(left=look_back((-1, 0))).is_packed(8)
    assert Visible(left=look_back((6, 0))).is_packed(8)
    assert documents_of(torch.zeros(2, 8, dtype=torch.int64)) is None
    assert documents_of(Documents.of_rows(2, 8, torch.device("cpu"))) is None
    assert documents_of(torch.tensor([[0] * 8, [3] * 7 + [4]])) is not None


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

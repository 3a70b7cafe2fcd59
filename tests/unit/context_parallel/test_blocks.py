"""Attention by chunks, merged, equals attention over the whole: the oracle is the plain formula and its autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron.context_parallel import blocks
from megatron.context_parallel.blocks import Finished, Pair, Softmax
from megatron.ops.attention import attention
from megatron.ops.documents import Documents

CHUNK, CHUNKS, SCALE = 6, 4, 0.31
SEQ = CHUNK * CHUNKS


def inputs(dtype: torch.dtype = torch.float64, groups: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, SEQ, 8), (2, groups, SEQ, 8), (2, groups, SEQ, 8), (2, 4, SEQ, 8)]
    query, key, value, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.to(dtype), key.to(dtype), value.to(dtype), grad.to(dtype)


def documents() -> Tensor:
    return torch.stack([torch.arange(SEQ) // 5, (torch.arange(SEQ) > 16).long()])


def pairs(look_back: int | None, document_ids: Tensor | None) -> list[Pair]:
    """Every query chunk with every earlier key chunk, its own first."""

    def cut(chunk: int) -> Tensor | None:
        return None if document_ids is None else document_ids[:, chunk * CHUNK : (chunk + 1) * CHUNK]

    return [Pair(q, k, (q - k) * CHUNK, look_back, cut(q), cut(k)) for q in range(CHUNKS) for k in range(q, -1, -1)]


def by_chunks(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, some: list[Pair], softmax: Softmax
) -> tuple[Tensor, ...]:
    """Result and the gradients of query, key and value."""
    wide = torch.promote_types(query.dtype, torch.float32)
    result, log_sum = torch.zeros_like(query, dtype=wide), torch.full(query.shape[:3], -torch.inf, dtype=wide)
    q, k, v, r, s, g = (x.split(CHUNK, 2) for x in (query, key, value, result, log_sum, grad))
    for pair in some:
        part = blocks.forward(q[pair.query_chunk], k[pair.key_chunk], v[pair.key_chunk], pair, softmax)
        blocks.merge_partial_attention(r[pair.query_chunk], s[pair.query_chunk], *part)
    delta = (result * grad).sum(-1).split(CHUNK, 2)
    gradients = [torch.zeros_like(x, dtype=wide) for x in (query, key, value)]
    dq, dk, dv = (x.split(CHUNK, 2) for x in gradients)
    for pair in some:
        a, b = pair.query_chunk, pair.key_chunk
        finished = Finished(s[a], g[a], delta[a])
        blocks.backward(q[a], k[b], v[b], pair, softmax, finished, (dq[a], dk[b], dv[b]))
    return result, *gradients


def whole(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, look_back: int | None, document_ids: Tensor | None
) -> tuple[Tensor, ...]:
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    documents = Documents.of_ids(torch.zeros(2, SEQ) if document_ids is None else document_ids)
    result = attention(query, key, value, mask=documents.mask(SEQ, look_back), causal=False, scale=SCALE)
    result.backward(grad)
    assert query.grad is not None and key.grad is not None and value.grad is not None
    return result.detach(), query.grad, key.grad, value.grad


@pytest.mark.parametrize("look_back", [None, 0, 4, 9, 100])
@pytest.mark.parametrize("document_ids", [None, documents()], ids=["one", "documents"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("rows", [4, 128], ids=["several-blocks", "one-block"])
def test_chunks_merged_are_the_whole(
    look_back: int | None, document_ids: Tensor | None, groups: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks._ROWS, "cpu", rows)
    tensors = inputs(groups=groups)
    ours = by_chunks(*tensors, pairs(look_back, document_ids), Softmax(SCALE))
    for got, expected in zip(ours, whole(*tensors, look_back, document_ids), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_the_order_of_merging_matters_to_rounding_only() -> None:
    """Includes queries that see nothing of the first chunk."""
    tensors, some = inputs(), pairs(3, documents())
    first = by_chunks(*tensors, some, Softmax(SCALE))
    for order in itertools.islice(itertools.permutations(some), 1, 5000, 977):
        for got, expected in zip(by_chunks(*tensors, list(order), Softmax(SCALE)), first, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    backwards = by_chunks(*tensors, some[::-1], Softmax(SCALE))
    torch.testing.assert_close(backwards, first, rtol=1e-12, atol=1e-13)


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    query, key, value, _ = (x[:, :, :CHUNK] for x in inputs())
    nothing = Pair(1, 0, CHUNK, 0, None, None)
    result, log_sum = blocks.forward(query, key, value, nothing, Softmax(SCALE))
    assert torch.equal(result, torch.zeros_like(result)) and bool((log_sum == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_merged_wide(dtype: torch.dtype) -> None:
    """Results are as exact as plain attention in the same dtype, with a factor of two for the sums."""
    exact = whole(*(x.to(dtype).double() for x in inputs()), None, None)
    plain = whole(*inputs(dtype), None, None)
    ours = by_chunks(*inputs(dtype), pairs(None, None), Softmax(SCALE))
    assert ours[0].dtype == torch.float32
    for got, theirs, wanted in zip(ours, plain, exact, strict=True):
        assert (got.double() - wanted).norm() <= 2 * (theirs.double() - wanted).norm()


def test_large_half_scores_do_not_overflow() -> None:
    """Scores reach a million; they stay finite, because they are kept wide as in PyTorch's own attention."""
    query, key, value, grad = inputs(torch.float16)
    query, key = query * 500, key * 500
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * SCALE
    assert scores.abs().max() > 5e5
    for got in by_chunks(query, key, value, grad, pairs(None, None), Softmax(SCALE)):
        assert bool(got.isfinite().all())


def test_dropout_in_backward_is_that_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with autograd of the formula, which drops the same elements."""
    query, key, value, grad = inputs()
    softmax, kept = Softmax(SCALE, dropout_p=0.4, seed=11), torch.zeros(2, 4, SEQ, SEQ, dtype=torch.float64)
    original = blocks._kept

    def noted(probabilities: Tensor, pair: Pair, start: int, math: Softmax) -> Tensor | None:
        result = original(probabilities, pair, start, math)
        assert result is not None
        row, column = pair.query_chunk * CHUNK + start, pair.key_chunk * CHUNK
        kept[:, :, row : row + result.shape[3], column : column + result.shape[4]] = result.flatten(1, 2)
        return result

    monkeypatch.setattr(blocks, "_kept", noted)
    ours = by_chunks(query, key, value, grad, pairs(None, None), softmax)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    triangle = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    scores = (leaves[0] @ keys.transpose(-1, -2) * SCALE).masked_fill(~triangle, -torch.inf)
    result = (torch.softmax(scores, -1) * kept) @ values
    result.backward(grad)
    for got, expected in zip(ours, (result, *(leaf.grad for leaf in leaves)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    seen = kept[:, :, triangle]
    assert set(seen.unique().tolist()) == {0.0, 1 / 0.6}
    assert 0.35 < (seen == 0).double().mean() < 0.45
    again = by_chunks(query, key, value, grad, pairs(None, None), Softmax(SCALE, dropout_p=0.4, seed=12))
    assert not torch.equal(again[0], ours[0])

"""Attention within documents: boundaries against a plain mask, every implementation against the formula in fp64."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.errors import DataError
from megatron.model.attention import CoreAttention
from megatron.model.attention_mask import Visible
from megatron.ops import resolve
from megatron.ops.attention import attention
from megatron.ops.documents import Documents
from megatron.ops.packed_attention import packed_attention, varlen_attention
from megatron.ops.proof import Call, Draw, Proof
from megatron.ops.proof.rounding import Near
from tests.helpers.declared import Refused
from tests.helpers.kernels import kernel
from tests.helpers.planted import Mistake
from tests.unit.model.helpers import config
from tests.unit.ops import test_attention_kernels
from tests.unit.ops.test_attention_kernels import BLOCKS

SCALE = test_attention_kernels.SCALE
BATCH, HEADS, GROUPS, WIDTH = 2, 4, 2, 24

ROW: dict[str, Any] = {"documents": Documents.of_rows(1, 3, torch.device("cpu")), "left": None, "scale": 1.0}
ONES = torch.ones(1, 2, 3, 5)
REFUSED: Refused = {
    "packed_attention": [
        ((*[ONES.double()] * 3, ROW), "float64 (1, 2, 3, 5): the kernel needs float32, bfloat16 or float16"),
        ((ONES, torch.ones(1, 2, 4, 5), torch.ones(1, 2, 4, 5), ROW), "documents of 1 x 3 keys for keys"),
    ],
}


def proof_calls(draw: Draw) -> Iterator[Call]:
    for batch, heads, groups, seq, width in ((1, 1, 1, 1, 1), (2, 2, 1, 5, 7), (1, 4, 2, 64, 80), (2, 3, 3, 130, 33)):
        three = draw(batch, heads, seq, width), draw(batch, groups, seq, width), draw(batch, groups, seq, width)
        starts = draw.integers(9, batch, seq) == 0
        for left in (None, 0, 40):
            yield Call(f"{batch, heads, groups, seq, width}, {left} before", (*three, starts, left))


def proof_oracle(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, left: int | None) -> Tensor:
    return packed_attention(query, key, value, documents=Documents.of_starts(starts), left=left, scale=SCALE)


def proof_kernel(ops: Any) -> Callable[..., Tensor]:
    native = kernel("packed_attention", ops)

    def call(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, left: int | None) -> Tensor:
        return native(query, key, value, documents=Documents.of_starts(starts), left=left, scale=SCALE)

    return call


def proof_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    *three, starts, left = args
    mask = Documents.of_starts(starts).mask(starts.shape[1], left)
    return test_attention_kernels.proof_bounds((*three, mask, False), upstreams)


CPU_PROOFS = {
    "packed_attention": Proof(
        name="packed_attention",
        folder="attention",
        kernel=proof_kernel,
        oracle=proof_oracle,
        calls=proof_calls,
        bounds=proof_bounds,
    )
}


def visible(ids: Tensor, left: int | None) -> Tensor:
    """The definition: same document, not later, at most `left` before. [batch, seq] -> bool [batch, seq, seq]"""
    place = torch.arange(ids.shape[1])
    distance = place.unsqueeze(1) - place
    near = (distance >= 0) & (distance <= (ids.shape[1] if left is None else left))
    return near & (ids.unsqueeze(2) == ids.unsqueeze(1))


ROWS = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, left=st.none() | st.integers(0, 14), first=st.integers(0, 11), length=st.integers(1, 12))
def test_boundaries_say_what_a_mask_says(rows: list[list[bool]], left: int | None, first: int, length: int) -> None:
    starts = torch.tensor(rows)
    documents, ids = Documents.of_starts(starts), starts.int().cumsum(1)
    mask = visible(ids, left)
    assert torch.equal(documents.mask(12, left)[:, 0], mask)
    end = min(first + length, 12)
    part = documents.part(first, end)
    assert torch.equal(part.mask(end - first, left)[:, 0], mask[:, first:end, :end])
    assert int(part.queries[-1]) == len(rows) * (end - first) and int(part.keys[-1]) == len(rows) * end
    assert bool((part.queries.diff() <= part.keys.diff()).all()), "the queries are the last keys of their document"
    number = documents.keys.numel() - 1
    assert number & (number - 1) == 0, "few shapes"
    lengths = documents.keys.diff()
    assert documents.longest == int(lengths.max()) and int(lengths.sum()) == starts.numel()
    assert documents.divide_rows == bool((starts[:, 1:]).any())


def test_ids_and_whole_rows() -> None:
    ids = torch.tensor([[4, 4, 4, 9], [2, 1, 1, 1]])
    documents = Documents.of_ids(ids)
    assert documents.keys.tolist() == [0, 3, 4, 5, 8] and documents.numbers().tolist() == [[0, 0, 0, 1], [2, 3, 3, 3]]
    whole = Documents.of_rows(2, 4, torch.device("cpu"))
    assert not whole.divide_rows and whole.keys.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 3, 4, 7, 7], "boundaries from 0 to 7: they must rise from 0 to 8 for 2 rows of 4 tokens"),
        ([1, 4, 8], "boundaries from 1 to 8: they must"),
        ([0, 4, 3, 4, 8], "they must rise"),
        ([0, 8, 8], "crosses the end of a row of 4 tokens (the longest document has 8); add the first token"),
        ([0, 2, 6, 8], "crosses the end of a row of 4 tokens (the longest document has 4)"),
    ],
)
def test_boundaries_that_do_not_fit(boundaries: list[int], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as error:
        Documents.of_boundaries(torch.tensor(boundaries, dtype=torch.int32), 2, 4, True)
    assert "\n" not in str(error.value)


def inputs(queries: int, keys: int, dtype: torch.dtype, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, HEADS, queries, width), (BATCH, GROUPS, keys, width), (BATCH, GROUPS, keys, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(function: Any, tensors: list[Tensor], **named: Any) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, **named, scale=SCALE)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("kernels", ["native", "auto,-packed_attention", "ref"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("left", [None, 0, 5, 100])
@pytest.mark.parametrize(("seq", "part"), [(24, None), (130, None), (200, (64, 128)), (200, (130, 200)), (96, (0, 33))])
def test_every_implementation_is_the_formula(
    kernels: str, dtype: torch.dtype, allowed: float, left: int | None, seq: int, part: tuple[int, int] | None
) -> None:
    starts = torch.from_numpy(np.random.default_rng(5).random((BATCH, seq)) < 0.06)
    first, end = part or (0, seq)
    documents = Documents.of_starts(starts) if part is None else Documents.of_starts(starts).part(first, end)
    tensors = inputs(end - first, end, dtype)
    got = results(resolve(kernels, "cpu").packed_attention, tensors, documents=documents, left=left)
    mask = visible(starts.int().cumsum(1), left)[:, None, first:end, :end]
    exact = results(attention, [tensor.double() for tensor in tensors], mask=mask, causal=False)
    for one, wanted in zip(got, exact, strict=True):
        assert one.dtype == dtype and (one.double() - wanted).norm() <= allowed * wanted.norm().clamp(min=20.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left", [None, 5])
def test_the_calls_of_a_gpu_have_the_right_shapes(dtype: torch.dtype, left: int | None) -> None:
    """Runs the calls of PyTorch's varlen kernels on the meta device: operators and arguments exist in this torch."""
    documents = Documents.of_starts(torch.arange(96).view(2, 48) % 7 == 0).part(16, 32).to(torch.device("meta"))
    tensors = [tensor.to("meta").requires_grad_() for tensor in inputs(16, 32, dtype)]
    out = varlen_attention(*tensors, documents=documents, left=left, scale=SCALE)
    assert out.shape == tensors[0].shape and out.dtype == dtype
    if dtype == torch.float32:  # torch's shape function of this derivative cannot be called (torch 2.13)
        assert "EfficientAttentionBackward" in names_of_derivatives(out)
        return
    grads = torch.autograd.grad(out.sum(), tensors)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in tensors]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("left", [None, 0, 5])
@pytest.mark.parametrize("part", [None, (16, 32), (0, 33), (40, 48)])
@pytest.mark.parametrize("rows", ["documents", "whole"])
def test_the_calls_of_a_gpu_mean_the_formula(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    allowed: float,
    left: int | None,
    part: tuple[int, int] | None,
    rows: str,
) -> None:
    """Replaces PyTorch's varlen kernels by their definition. The last keys of a row can have fewer queries, as in a
    chunk of the sequence or a pass with a cache."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_by_definition)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient_by_definition)
    first, end = part or (0, 48)
    starts = torch.arange(BATCH * 48).view(BATCH, 48) % 11 == 0
    if rows == "whole":
        starts = torch.zeros_like(starts)
        documents = Documents.of_rows(BATCH, end, torch.device("cpu"), end - first)
    else:
        documents = Documents.of_starts(starts)
        documents = documents if part is None else documents.part(first, end)
    tensors = inputs(end - first, end, dtype)
    out = varlen_attention(*tensors, documents=documents, left=left, scale=SCALE)
    mask = visible(starts.int().cumsum(1), left)[:, None, first:end, :end]
    exact = attention(*[tensor.double() for tensor in tensors], mask=mask, causal=False, scale=SCALE)
    assert out.dtype == dtype and (out.double() - exact).norm() <= allowed * exact.norm()


@pytest.mark.parametrize(("dtype", "width", "kernel"), [
    (torch.bfloat16, 20, "flash"), (torch.float16, 256, "flash"), (torch.bfloat16, 264, "efficient"),
    (torch.float32, 20, "efficient"), (torch.float64, 20, None),
])  # fmt: skip
def test_every_head_width_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, kernel: str | None
) -> None:
    """Flash takes widths up to 256 in half precision. Both kernels take multiples of 8."""
    used = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **named: used.append(name) or function(*args, **named)

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", noted("efficient", efficient_by_definition))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noted("flash", flash_by_definition))
    documents = Documents.of_starts(torch.arange(BATCH * 24).view(BATCH, 24) % 7 == 0)
    tensors = inputs(24, 24, dtype, width)
    out = varlen_attention(*tensors, documents=documents, left=None, scale=SCALE)
    exact = packed_attention(*[t.double() for t in tensors], documents=documents, left=None, scale=SCALE)
    assert used == ([kernel] if kernel else []) and out.shape == exact.shape
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_calls_of_a_gpu_pass_dropout(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    passed: dict[str, Any] = {}
    tensors = [tensor.to("meta") for tensor in inputs(48, 48, dtype)]
    documents = Documents.of_rows(BATCH, 48, torch.device("meta"))
    operator = "_flash_attention_forward" if dtype == torch.bfloat16 else "_efficient_attention_forward"
    with noted_calls(operator, passed):
        varlen_attention(*tensors, documents=documents, left=None, scale=SCALE, dropout_p=0.25)
    names = [argument.name for argument in getattr(torch.ops.aten, operator).default._schema.arguments]
    assert passed["args"][names.index("dropout_p")] == 0.25


def test_a_recording_takes_a_batch_with_a_longer_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded call keeps its numbers, so the length that it was recorded with must allow every document."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_by_definition)
    place = Documents.of_starts(torch.arange(BATCH * 24).view(BATCH, 24) % 3 == 0).for_recording()
    other = Documents.of_starts(torch.arange(BATCH * 24).view(BATCH, 24) % 20 == 0)
    place.copy_(other)
    tensors = inputs(24, 24, torch.bfloat16)
    out = varlen_attention(*tensors, documents=place, left=None, scale=SCALE)
    exact = packed_attention(*[t.double() for t in tensors], documents=other, left=None, scale=SCALE)
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()


def flash_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    dropout_p: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor]:
    """query [tokens, heads, d], key and value [tokens, groups, d]. The last query of a document sees its last key."""
    assert is_causal and not debug and window_size_right == 0 and not dropout_p and query.shape[2] % 8 == 0
    assert queries.dtype == keys.dtype == torch.int32 and len(queries) == len(keys)
    assert (int(queries[-1]), int(keys[-1])) == (len(query), len(key)) and not queries[0] and not keys[0]
    out = torch.full_like(query, torch.nan)
    for (q, q_end), (k, k_end) in zip(queries.unfold(0, 2, 1).tolist(), keys.unfold(0, 2, 1).tolist(), strict=True):
        assert q_end - q <= most_queries and k_end - k <= most_keys
        three = (t[None].transpose(1, 2) for t in (query[q:q_end], key[k:k_end], value[k:k_end]))
        distance = torch.arange(k_end - k - (q_end - q), k_end - k).unsqueeze(1) - torch.arange(k_end - k)
        near = (distance >= 0) & (distance <= (len(key) if window_size_left < 0 else window_size_left))
        found = attention(*(t.double() for t in three), mask=near, causal=False, scale=scale)
        out[q:q_end] = found[0].transpose(0, 1).to(query.dtype)
    return (out,)


def efficient_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    dropout_p: float,
    mask_type: int,
    log_sum_exp: bool,
    *,
    scale: float,
    window_size: int | None,
) -> tuple[Tensor]:
    """query, key and value [1, tokens, heads, d]; mask type 2 is causal from the bottom right. A window counts a
    query's own key."""
    assert mask_type == 2 and bias is None and query.shape[2] == key.shape[2]
    assert log_sum_exp == torch.is_grad_enabled(), "backward needs it"
    query, key, value = (t[0] for t in (query, key, value))
    left = -1 if window_size is None else window_size - 1
    return (
        flash_by_definition(
            query, key, value, queries, keys, most_queries, most_keys, dropout_p, True, False,
            scale=scale, window_size_left=left, window_size_right=0,
        )[0][None],
    )  # fmt: skip


FLASH = (
    "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
)
EFFICIENT = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float dropout_p, int custom_mask_type, "
    "bool compute_log_sumexp=False, *, float? scale=None, Tensor? seqlen_k=None, int? window_size=None"
)
"""Arguments in torch 2.10 and 2.11, read from their libraries."""


@pytest.mark.parametrize(
    ("operator", "arguments", "newer"),
    [
        ("_flash_attention_forward", FLASH, ", Tensor? block_table=None, int? num_splits=None"),  # torch 2.12 and 2.13
        ("_efficient_attention_forward", EFFICIENT, ""),
    ],
)
def test_the_calls_of_a_gpu_fit_every_torch(operator: str, arguments: str, newer: str) -> None:
    """torch 2.12 added optional arguments, which our call does not pass. A torch with other arguments fails here."""
    schema = str(getattr(torch.ops.aten, operator).default._schema)
    added = newer if torch.__version__ >= torch.torch_version.TorchVersion("2.12") else ""
    assert schema.startswith(f"aten::{operator}({arguments}{added}) -> (Tensor output, Tensor")
    passed: dict[str, Any] = {}
    documents = Documents.of_starts(torch.arange(96).view(2, 48) % 7 == 0).to(torch.device("meta"))
    three = [tensor.to("meta") for tensor in inputs(48, 48, torch.bfloat16 if "flash" in operator else torch.float32)]
    with noted_calls(operator, passed):
        varlen_attention(*three, documents=documents, left=5, scale=SCALE)
    old = torch._C.parse_schema(f"aten::{operator}({arguments}) -> Tensor")
    positional = [argument for argument in old.arguments if not argument.kwarg_only]
    assert len(passed["args"]) <= len(positional)
    assert set(passed["named"]) <= {argument.name for argument in old.arguments if argument.kwarg_only}


class noted_calls(TorchFunctionMode):
    """Notes the arguments of an operator's call."""

    def __init__(self, operator: str, passed: dict[str, Any]) -> None:
        super().__init__()
        self.operator, self.passed = operator, passed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.operator in str(function):
            self.passed.update(args=args, named=kwargs)
        return function(*args, **(kwargs or {}))


MISTAKES = {
    "first keys of another row": (
        BLOCKS,
        "batch * shape.from_batch + pair.first_query + row]",
        "pair.first_query + row]",
    ),
    "first keys of the block's first query": (BLOCKS, "+ pair.first_query + row] - pair", "+ pair.first_query] - pair"),
    "blocks left out too early": (
        BLOCKS,
        "std::min_element(from, from + queries)",
        "std::max_element(from, from + queries)",
    ),
    "keys of a document left out": (BLOCKS, "i >= first && i < last", "i > first && i < last"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_bugs_are_seen(tmp_path: Path, name: str) -> None:
    Mistake(*MISTAKES[name], "packed_attention", on_cpu=True).must_be_seen(tmp_path)


def names_of_derivatives(out: Tensor) -> str:
    nodes, names = [out.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(node.name())
            nodes += [parent for parent, _ in node.next_functions]
    return " ".join(names)


def test_a_pass_with_a_cache_has_its_own_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core attention of a pass of three tokens after six of a cache, with a window, by the calls of a GPU."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_by_definition)
    kernels = dataclasses.replace(resolve("ref", "cpu"), packed_attention=varlen_attention)
    core = CoreAttention(config(num_attention_heads=HEADS, hidden_size=HEADS * WIDTH, attention_dropout=0), 1, kernels)
    query, key, value = inputs(3, 9, torch.bfloat16)
    mask = visible(torch.zeros(BATCH, 9), 4)[:, None, 6:]
    exact = attention(query.double(), key.double(), value.double(), mask=mask, causal=False, scale=core.scale)
    out = core(query, key, value, Visible(left=4))
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()

"""The three core attentions on gloo ranks beside the plain one, in every dtype, with masks and with dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.context_parallel import GatheredAttention, RingAttention, SharedSequence, UlyssesAttention
from megatron.context_parallel.sequence import in_sequence, own_part
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import ConfigError
from megatron.layout import Layout
from megatron.model.attention import CoreAttention
from megatron.model.attention_mask import Visible, documents_of, look_back
from megatron.model.gpt import GPT
from megatron.ops import resolve
from tests.helpers.distributed import run_ranks

KINDS = {"p2p": RingAttention, "a2a": UlyssesAttention, "allgather": GatheredAttention}
SEQ = 24
CPU = torch.device("cpu")


def config(**changes: Any) -> ModelConfig:
    small = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": SEQ}
    return ModelConfig(**{**small, "attention_dropout": 0.0, **changes})


def inputs(dtype: torch.dtype, groups: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 4, SEQ, 8), (2, groups, SEQ, 8), (2, groups, SEQ, 8), (2, 4, SEQ, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def attend(core: Any, tensors: list[Tensor], visible: Any) -> list[Tensor]:
    """Result and the three gradients."""
    *leaves, grad = tensors
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    result = core(*leaves, visible)
    result.backward(grad)
    return [result.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def at_ranks(rank: int, ranks: int, cases: list[tuple[str, torch.dtype, int, Any, Any]]) -> list[list[Tensor]]:
    cp = ParallelState.build(Layout(ranks, cp=ranks), rank).cp
    found = []
    for kind, dtype, groups, window, document_ids in cases:
        core = KINDS[kind](CoreAttention(config(), 1, resolve("auto", "cpu")), cp, window)
        parts = [own_part(x, cp, 2) for x in inputs(dtype, groups)]
        visible = core.visible(cp, torch.Size((2, SEQ // ranks)), window, documents_of(document_ids), CPU)
        found.append(attend(core, parts, visible))
    return found


DOCUMENTS = torch.stack([torch.arange(SEQ) // 7, (torch.arange(SEQ) > 3).long()])


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_and_type_is_the_plain_core(ranks: int) -> None:
    cases = [
        (kind, dtype, groups, window, document_ids)
        for kind in KINDS
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        for groups in (1, 2)
        for window, document_ids in ((None, None), ((5, 0), None), (None, DOCUMENTS), ((5, 0), DOCUMENTS))
    ]
    results = run_ranks(ranks, at_ranks, ranks, cases)
    plain = CoreAttention(config(), 1, resolve("ref", "cpu"))
    for number, (kind, dtype, groups, window, document_ids) in enumerate(cases):
        visible = Visible(documents_of(document_ids), look_back(window))
        exact = attend(plain, [x.double() for x in inputs(dtype, groups)], visible)
        allowed = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        for index, wanted in enumerate(exact):
            got = in_sequence(torch.cat([rank[number][index] for rank in results], 2), ranks, 2)
            assert got.dtype == dtype
            off = (got.double() - wanted).norm() / wanted.norm()
            assert off < allowed, (kind, dtype, groups, window, index, off)


def with_dropout(rank: int, ranks: int) -> dict[str, list[Tensor]]:
    """Outputs with dropout, twice from one random state and once from another; values are all ones."""
    cp = ParallelState.build(Layout(ranks, cp=ranks), rank).cp
    found = {}
    for kind, attention in KINDS.items():
        core = attention(CoreAttention(config(attention_dropout=0.5), 1, resolve("auto", "cpu")), cp, None)
        query, key, value, _ = (own_part(x, cp, 2) for x in inputs(torch.float32, 2))
        visible = core.visible(cp, torch.Size((2, SEQ // ranks)), None, None, CPU)
        outputs = []
        for seed in (rank, rank, 100 + rank):
            torch.manual_seed(seed)
            outputs.append(core(query, key, torch.ones_like(value), visible))
        core.eval()
        found[kind] = [*outputs, core(query, key, torch.ones_like(value), visible)]
    return found


def test_dropout_keeps_the_mean_and_repeats_from_its_random_state() -> None:
    results = run_ranks(2, with_dropout, 2)
    for kind in KINDS:
        for rank in results:
            first, again, other, evaluated = rank[kind]
            assert torch.equal(first, again) and not torch.equal(first, other)
            assert first.std() > 0.1, "nothing was dropped"
            assert abs(first.mean() - 1.0) < 0.1, kind
            torch.testing.assert_close(evaluated, torch.ones_like(evaluated))
        assert not torch.equal(results[0][kind][0], results[1][kind][0]), "ranks drop different elements"


def test_positions_that_nobody_gave_are_those_of_the_sequence() -> None:
    cp = Axis("cp", 0, 2, (0, 1))
    found = SharedSequence(cp, RingAttention).positions(6, 0, torch.device("cpu"))
    assert found.tolist() == [0, 1, 2, 9, 10, 11]


def test_generation_with_a_cache_is_refused() -> None:
    model = GPT(config(), vocab_size=11, kernels=resolve("auto", "cpu"))
    cache = model.make_cache(1, SEQ)
    sequence = SharedSequence(Axis("cp", 0, 2, (0, 1)), UlyssesAttention)
    with pytest.raises(ConfigError, match=r"--context-parallel-size 2: .* use --context-parallel-size 1"):
        sequence.past(cache)

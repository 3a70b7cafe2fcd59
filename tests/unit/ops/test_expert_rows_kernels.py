"""Kernels of experts' rows beyond the table of proofs: orders that a layer makes, wrong indices, saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, ones

from megatron.config import MoEConfig
from megatron.ops import expert_rows
from megatron.ops.expert_rows import ByExpert, by_expert, within_buffers
from tests.helpers.declared import Refused
from tests.helpers.kernels import Backend, backend, kernel
from tests.unit.model.helpers import LLAMA, build, config, tokens

ORDER = by_expert(torch.tensor([3, 0, 1, 3, 3, 1]), 4, 1)  # 10 rows
REFUSED: Refused = {
    "taken": [
        ((ones(3, 2, 8), ORDER, 2), "x float32 (3, 2, 8) with 6 choices, 2 of a token: the kernel needs [tokens,"),
        ((ones(2, 8), ORDER, 2), "with all choices of all tokens"),
    ],
    "weighted_sum": [
        ((ones(9, 8), ORDER, ones(3, 2)), "rows float32 (9, 8) with weights float32 (3, 2): the kernel needs [10,"),
        ((ones(10, 8), ORDER, ones(2, 2)), "[tokens, per] of 6 choices"),
        ((ones(10, 8), ORDER, ones(6)), "[tokens, per] of 6 choices"),
        ((ones(10, 8), ORDER, ones(3, 2).bfloat16()), "with weights bfloat16 (3, 2): the kernel needs one dtype"),
    ],
}
ON_CPU = ("cpu", "emulated")


def orders() -> dict[str, ByExpert]:
    """Orders of 20 choices among 5 experts."""
    generator = torch.Generator().manual_seed(4)
    chosen = torch.randint(0, 5, (2, 10), generator=generator)
    first = torch.arange(10) < torch.tensor([[7], [4]])  # at most 7 of an expert
    return {
        "no padding": by_expert(chosen.flatten(), 5, 0),
        "padding": by_expert(chosen.flatten(), 5, 1),
        "accepted": by_expert(chosen.flatten(), 5, 0, accepted=first.flatten()),
        "buffers": within_buffers(chosen, first, 5, 7),
    }


def computed(where: Backend | None, order: ByExpert, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Results and gradients of both operations with the kernels, or without them."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    taken = expert_rows.taken if where is None else kernel("taken", where.ops)
    weighted_sum = expert_rows.weighted_sum if where is None else kernel("weighted_sum", where.ops)
    rows = taken(x, order, 2)
    back = taken(rows, order.back)
    y = weighted_sum(rows * 2, order, weights)
    return [rows, back, y, *torch.autograd.grad([y.sin().sum(), back.cos().sum()], [x, weights])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", orders())
@pytest.mark.parametrize("name", ON_CPU)
def test_a_layers_orders_give_what_the_formulas_give(name: str, order: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    x, weights = (torch.randn(10, size, generator=generator).to(dtype) for size in (24, 2))
    ours = computed(backend(name), orders()[order], x, weights)
    theirs = computed(None, orders()[order], x, weights)
    torch.testing.assert_close(ours, theirs, **({} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}))


def test_no_gathered_rows_are_saved() -> None:
    saved: list[Tensor] = []
    rows, weights = torch.randn(10, 8, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):  # type: ignore[func-returns-value]
        kernel("weighted_sum", backend("cpu").ops)(rows, ORDER, weights)
    assert [one.data_ptr() for one in saved] == [rows.data_ptr(), weights.data_ptr()]


@pytest.mark.parametrize("index", [-2, 6, 2**40])
def test_an_index_of_nothing_is_an_error_on_a_cpu_and_no_row_on_a_gpu(index: int) -> None:
    """A GPU could report it only with a host sync."""
    x, wrong = torch.randn(6, 8), torch.tensor([5, index])
    for call in (
        lambda ops: ops.take_rows(x, wrong, 1, None),
        lambda ops: ops.sum_rows(x, wrong, 1, None),
        lambda ops: ops.row_products(x, wrong, x[:2], 1),
    ):
        with pytest.raises(RuntimeError, match=f"has {index}, beyond 6"):
            call(backend("cpu").ops)
        found = call(backend("emulated").ops)
        assert found[0].any() and not found[1].any()


@pytest.mark.parametrize("name", ON_CPU)
def test_the_binding_checks_sizes(name: str) -> None:
    ops, x, place = backend(name).ops, torch.ones(6, 8), torch.arange(6)
    with pytest.raises(RuntimeError, match="6 choices, 4 for each token"):
        ops.sum_rows(x, place, 4, None)
    with pytest.raises(RuntimeError, match="not one number of the rows' type for every choice"):
        ops.sum_rows(x, place, 2, torch.ones(5))
    with pytest.raises(RuntimeError, match="dy is not one row"):
        ops.row_products(x, place, torch.ones(2, 8), 2)
    with pytest.raises(RuntimeError, match="source is not one row of int64"):
        ops.take_rows(x, place.int(), 1, None)


def test_a_layer_runs_the_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend("cpu")
    model = build(config(**LLAMA), kernels="native", moe=MoEConfig(num_experts=4))
    monkeypatch.delattr(expert_rows, "_rows")  # without it the formulas fail
    model(tokens(2, 5), labels=tokens(2, 5)).sum().backward()
    with pytest.raises(NameError):
        build(config(**LLAMA), kernels="ref", moe=MoEConfig(num_experts=4))(tokens(2, 5), labels=tokens(2, 5))

"""Any number of rows travels to experts and back; the experts' gradients have their own axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.data_parallel import BucketStore
from megatron.distributed import collectives
from megatron.distributed.collectives import Pending
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.expert_parallel import ExpertDispatcher, exchanged
from megatron.layout import Layout
from megatron.model.factory import LocalDispatcher
from megatron.ops.expert_rows import ByExpert, RowGroups, taken
from megatron.tensor_parallel import mappings
from tests.helpers.distributed import run_ranks

WIDTH, EXPERTS = 3, 6
COUNTS = {  # rank -> how many of its rows each expert gets; rank 1 has none at all, and expert 4 gets none
    0: [2, 0, 1, 0, 0, 3],
    1: [0, 0, 0, 0, 0, 0],
    2: [1, 1, 1, 1, 0, 1],
    3: [0, 7, 0, 0, 0, 0],
}


def rows_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(COUNTS[rank]), WIDTH, dtype=torch.float64, generator=generator)


def make_experts() -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(99)
    return {n: torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) for n in range(EXPERTS)}


def run(weights: list[Tensor]) -> Callable[[Tensor, RowGroups], Tensor]:
    def experts(rows: Tensor, groups: RowGroups) -> Tensor:
        counts = groups.counts.tolist()
        assert counts == groups.on_host and len(counts) == len(weights) and sum(counts) == len(rows)
        return torch.cat([part.tanh() @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])

    return experts


def dispatched(rank: int, ep: int, tp: int, split_tokens: bool) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Results of this rank's rows, their gradient, and the gradients of the local experts."""
    state = ParallelState.build(Layout(4, tp=tp, ep=ep), rank)
    tokens_of = rank if split_tokens or tp == 1 else state.tp.ranks[0]  # else the tensor-parallel ranks see the same
    rows, counts = rows_of(tokens_of).requires_grad_(), torch.tensor(COUNTS[tokens_of])
    share = EXPERTS // ep
    every = make_experts()
    here = {n: every[n].requires_grad_() for n in range(state.ep.rank * share, (state.ep.rank + 1) * share)}
    # Tensor-parallel ranks compute a part of every expert: here, as if each had 1 / tp of its output.
    parts = [weight / tp for weight in here.values()]
    calls: list[Tensor] = []

    def noted(x: Tensor, order: ByExpert) -> Tensor:
        calls.append(x)
        return taken(x, order)

    copied, summed = mappings.copied, mappings.summed
    dispatcher = ExpertDispatcher(
        state.ep, state.tp, split_tokens=split_tokens, copied=copied, summed=summed, taken=noted
    )
    result, _ = dispatcher(rows, RowGroups(counts, len(rows)), run(parts), lambda: None)
    assert len(calls) == (2 if dispatcher.moves_rows else 0)  # the given operation alone moves rows
    result.square().sum().backward()
    grads = {n: weight.grad * tp for n, weight in here.items() if weight.grad is not None}
    assert rows.grad is not None
    return result.detach(), rows.grad, grads


def alone(token_ranks: list[int]) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
    every = {n: weight.requires_grad_() for n, weight in make_experts().items()}
    results, row_grads = {}, {}
    for rank in token_ranks:
        rows = rows_of(rank).requires_grad_()
        groups = RowGroups(torch.tensor(COUNTS[rank]), len(rows))
        result, _ = LocalDispatcher(0)(rows, groups, run(list(every.values())), lambda: None)
        result.square().sum().backward()
        assert rows.grad is not None
        results[rank], row_grads[rank] = result.detach(), rows.grad
    return results, row_grads, {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in every.items()}


@pytest.mark.parametrize(
    ("ep", "tp", "split_tokens"), [(2, 1, False), (2, 2, True), (2, 2, False), (1, 4, True), (1, 2, False)]
)
def test_the_dispatcher_is_the_local_one(ep: int, tp: int, split_tokens: bool) -> None:
    layout = Layout(4, tp=tp, ep=ep)
    found = run_ranks(4, dispatched, ep, tp, split_tokens)
    for rank, (result, row_grad, expert_grads) in enumerate(found):
        group = [member for peer in layout.group_of("ep", rank) for member in layout.group_of("tp", peer)]
        sources = group if split_tokens or tp == 1 else [m for m in group if layout.coordinates(m).tp == 0]
        mine = rank if split_tokens or tp == 1 else layout.group_of("tp", rank)[0]
        results, row_grads, grads = alone(sources)
        assert torch.allclose(result, results[mine], rtol=0, atol=1e-13)
        assert torch.allclose(row_grad, row_grads[mine], rtol=0, atol=1e-13)
        assert len(expert_grads) == EXPERTS // ep
        for number, gradient in expert_grads.items():
            assert torch.allclose(gradient, grads[number], rtol=0, atol=1e-13)


def there_and_back(rank: int) -> bool:
    state = ParallelState.build(Layout(3), rank)
    send = [[1, 0, 2], [0, 0, 0], [3, 1, 0]][rank]
    receive = [[1, 0, 3], [0, 0, 1], [2, 0, 0]][rank]
    rows = (torch.arange(sum(send) * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    received = exchanged(rows, send, receive, state.world)
    assert [int(row[0].item()) // 100 for row in received] == [m for m in range(3) for _ in range(receive[m])]
    back = exchanged(received * 2, receive, send, state.world)
    assert torch.equal(back, rows * 2)
    back.square().sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, 8 * rows)
    return True


def test_rows_come_back_to_where_they_were() -> None:
    assert run_ranks(3, there_and_back) == [True] * 3


def test_one_rank_sends_nothing() -> None:
    rows = torch.ones(4, 2)
    assert exchanged(rows, [4], [4], Axis.single("ep")) is rows


class Noted(torch.autograd.Function):
    """Doubles a tensor; notes when it runs, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("other")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.events.append("other, backward")
        return grad * 2, None


def order_of_events(rank: int) -> list[str]:
    state, events = ParallelState.build(Layout(2, ep=2), rank), list[str]()
    begin = collectives.start_exchange

    def noted(rows: Tensor, *rest: Any) -> Pending:
        pending = begin(rows, *rest)
        events.append("start")
        return replace(pending, result=lambda: events.append("result") or pending.result())  # type: ignore[func-returns-value]

    collectives.start_exchange = noted
    rows, counts = rows_of(rank).requires_grad_(), torch.tensor(COUNTS[rank])
    dispatcher = ExpertDispatcher(
        state.ep, state.tp, split_tokens=False, copied=mappings.copied, summed=mappings.summed
    )
    mine = list(make_experts().values())[rank * 3 : rank * 3 + 3]
    groups = RowGroups(counts, len(rows))
    result, other = dispatcher(rows, groups, run(mine), lambda: Noted.apply(rows.sum(), events))
    events.append("|")
    (result.sum() + other).backward()
    return events


def test_other_work_runs_while_rows_travel() -> None:
    """A result is looked at twice: when it is promised and when it has arrived."""
    forward = ["start", "result", "other", "result", "start", "result", "result", "|"]
    backward = ["start", "result", "start", "other, backward", "result"]
    assert run_ranks(2, order_of_events) == [[*forward, *backward]] * 2


def gradients_by_axis(rank: int, overlap: bool) -> dict[str, float]:
    state = ParallelState.build(Layout(4, ep=2), rank)
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("dense", "expert", "last")})
    axes = {"expert.weight": state.expert_dp}
    grads = BucketStore(model.named_parameters(), state.dp_cp, axes=axes, bucket_size=1, overlap=overlap)
    for _ in range(2):
        grads.zero()
        grads.arm()
        sum(layer(torch.tensor([10.0**rank])).sum() for layer in model.values()).backward()
        grads.reduce()
    return {name: grad.item() for name, grad in grads.grads()}


@pytest.mark.parametrize("overlap", [False, True])
def test_each_gradient_is_summed_over_its_axis(overlap: bool) -> None:
    for rank, found in enumerate(run_ranks(4, gradients_by_axis, overlap)):
        assert found == {"dense.weight": 1111, "expert.weight": (101, 1010)[rank % 2], "last.weight": 1111}

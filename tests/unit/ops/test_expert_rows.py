"""Rows sorted by expert and back, against the same order written as loops; gradients; planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from megatron.ops import expert_rows
from megatron.ops.expert_rows import ByExpert, RowGroups, by_expert, taken, weighted_sum, within_buffers

EXPERTS, WIDTH = 5, 3
CHOSEN = {
    "all but one": [3, 0, 1, 3, 3, 1, 0, 4],
    "one expert": [2, 2, 2, 2],
    "one choice": [4],
    "none": [],
}


def sorted_by_loops(chosen: Sequence[int], padding: int) -> list[int]:
    """The choice of every row; -1 for padding."""
    of_experts = [[c for c, expert in enumerate(chosen) if expert == e] + [-1] * padding for e in range(EXPERTS)]
    return [choice for rows in of_experts for choice in rows]


def buffers_by_loops(chosen: Tensor, accepted: Tensor, capacity: int) -> list[int]:
    sequences, choices = chosen.shape
    rows: list[int] = []
    for expert in range(EXPERTS):
        for b in range(sequences):
            inside = [b * choices + c for c in range(choices) if accepted[b, c] and chosen[b, c] == expert]
            rows += inside + [-1] * (capacity - len(inside))
    return rows


def places(source: Sequence[int], choices: int) -> list[int]:
    return [source.index(choice) if choice in source else -1 for choice in range(choices)]


def accepted_at_random(chosen: Tensor, capacity: int) -> Tensor:
    """Accepts choices in an order of chance, while the expert has room in the sequence."""
    generator, accepted = torch.Generator().manual_seed(5), torch.zeros_like(chosen, dtype=torch.bool)
    for b in range(len(chosen)):
        left = [capacity] * EXPERTS
        for c in torch.randperm(chosen.shape[1], generator=generator).tolist():
            expert = int(chosen[b, c])
            accepted[b, c] = left[expert] > 0 and c % 5 != 3  # some are rejected although there is room
            left[expert] -= int(accepted[b, c])
    return accepted


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_choices_are_sorted_by_expert(chosen: list[int], padding: int) -> None:
    order = by_expert(torch.tensor(chosen, dtype=torch.int64), EXPERTS, padding)
    expected = sorted_by_loops(chosen, padding)
    assert order.source.tolist() == expected and order.place.tolist() == places(expected, len(chosen))
    counts = [chosen.count(expert) + padding for expert in range(EXPERTS)]
    assert order.groups.on_host == order.groups.counts.tolist() == counts
    assert order.groups.ends.dtype == torch.int32 and order.groups.ends.diff().tolist() == counts[1:]
    known = by_expert(torch.tensor(chosen, dtype=torch.int64), EXPERTS, padding, [n - padding for n in counts])
    assert known.groups.on_host == counts


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("accepted", [[True] * 8, [False] * 8, [True, False, True, True, False, False, True, True]])
def test_choices_that_are_not_accepted_have_no_row(accepted: list[bool], padding: int) -> None:
    chosen = CHOSEN["all but one"]
    order = by_expert(torch.tensor(chosen), EXPERTS, padding, accepted=torch.tensor(accepted))
    kept = [expert if keep else -1 for expert, keep in zip(chosen, accepted, strict=True)]
    expected = sorted_by_loops(kept, padding)
    assert order.source.tolist() == expected and order.place.tolist() == places(expected, len(chosen))
    assert order.groups.on_host == [kept.count(expert) + padding for expert in range(EXPERTS)]


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_every_expert_and_sequence_has_a_buffer(capacity: int) -> None:
    chosen = torch.randint(0, EXPERTS, (3, 11), generator=torch.Generator().manual_seed(2))
    accepted = accepted_at_random(chosen, capacity)
    order, expected = within_buffers(chosen, accepted, EXPERTS, capacity), buffers_by_loops(chosen, accepted, capacity)
    assert order.source.tolist() == expected and order.place.tolist() == places(expected, chosen.numel())
    assert -1 in expected and -1 in order.place.tolist()
    assert order.groups.on_host == order.groups.counts.tolist() == [3 * capacity] * EXPERTS and order.groups.fixed


def orders() -> dict[str, tuple[ByExpert, int]]:
    """name -> (order, number of choices)."""
    chosen = torch.randint(0, EXPERTS, (2, 8), generator=torch.Generator().manual_seed(3))
    return {
        "no padding": (by_expert(chosen.flatten(), EXPERTS, 0), 16),
        "padding": (by_expert(chosen.flatten(), EXPERTS, 2), 16),
        "accepted": (by_expert(chosen.flatten(), EXPERTS, 1, accepted=torch.arange(16) % 3 > 0), 16),
        "buffers": (within_buffers(chosen, accepted_at_random(chosen, 2), EXPERTS, 2), 16),
    }


def taken_by_loops(x: Tensor, order: ByExpert, per: int) -> Tensor:
    rows = [x[source // per] if source >= 0 else torch.zeros(WIDTH, dtype=x.dtype) for source in order.source.tolist()]
    return torch.stack(rows)


@pytest.mark.parametrize("per", [1, 2, 4])
@pytest.mark.parametrize("name", orders())
def test_rows_are_taken_and_brought_back(name: str, per: int) -> None:
    order, choices = orders()[name]
    x = torch.randn(choices // per, WIDTH, dtype=torch.float64, requires_grad=True)
    rows = taken(x, order, per)
    assert torch.equal(rows, taken_by_loops(x, order, per))
    back = taken(rows, order.back)
    kept = (order.place >= 0).unsqueeze(1)
    assert torch.equal(back, x.detach().repeat_interleave(per, 0) * kept)
    assert torch.autograd.gradcheck(lambda x: taken(x, order, per), (x,))
    assert torch.autograd.gradcheck(lambda rows: taken(rows, order.back), (rows.detach().requires_grad_(),))


def summed_by_loops(rows: Tensor, order: ByExpert, weights: Tensor) -> Tensor:
    tokens, per = weights.shape
    y = torch.zeros(tokens, WIDTH, dtype=rows.dtype)
    for choice, row in enumerate(order.place.tolist()):
        if row >= 0:
            y[choice // per] += weights[choice // per, choice % per] * rows[row]
    return y


@pytest.mark.parametrize("per", [1, 2, 4])
@pytest.mark.parametrize("name", orders())
def test_rows_are_weighted_and_added(name: str, per: int) -> None:
    order, choices = orders()[name]
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(len(order.source), WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.randn(choices // per, per, dtype=torch.float64, generator=generator, requires_grad=True)
    y = weighted_sum(rows, order, weights)
    torch.testing.assert_close(y, summed_by_loops(rows, order, weights))
    assert torch.autograd.gradcheck(lambda rows, weights: weighted_sum(rows, order, weights), (rows, weights))


def test_a_rank_without_rows_has_only_padding() -> None:
    order = by_expert(torch.zeros(0, dtype=torch.int64), EXPERTS, 1)
    x = torch.zeros(0, WIDTH, requires_grad=True)
    rows = taken(x, order)
    assert torch.equal(rows, torch.zeros(EXPERTS, WIDTH))
    weights = torch.zeros(0, 2, requires_grad=True)
    (taken(rows, order.back).sum() + weighted_sum(rows, order, weights).sum()).backward()
    for one in (x, weights):
        assert one.grad is not None and one.grad.shape == one.shape


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def padding_is_the_last_row(x: Tensor, index: Tensor, some_missing: bool) -> Tensor:
    return x[index]


def padding_is_the_first_row(x: Tensor, index: Tensor, some_missing: bool) -> Tensor:
    return x[index.clamp(min=0)]


@pytest.mark.parametrize("bug", [padding_is_the_last_row, padding_is_the_first_row])
@pytest.mark.parametrize("name", ["padding", "accepted", "buffers"])
def test_rows_of_something_else_are_seen(
    name: str, bug: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_rows, "_rows", bug)
    with pytest.raises(AssertionError):
        test_rows_are_taken_and_brought_back(name, 1)
    with pytest.raises((AssertionError, GradcheckError)):
        test_rows_are_weighted_and_added(name, 1)


def test_a_wrong_place_is_seen() -> None:
    order = by_expert(torch.tensor(CHOSEN["all but one"]), EXPERTS, 0)
    wrong = replace(order, place=order.place.roll(1))
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    assert torch.equal(taken(taken(x, order), order.back), x)
    assert not torch.equal(taken(taken(x, wrong), wrong.back), x)


def test_the_host_is_asked_once() -> None:
    asked: list[Tensor] = []

    class Counted(RowGroups):
        def __init__(self, counts: Tensor) -> None:
            super().__init__(counts, 3)
            tolist = counts.tolist
            counts.tolist = lambda: asked.append(counts) or tolist()  # type: ignore[method-assign, func-returns-value]

    groups = Counted(torch.tensor([1, 2]))
    assert groups.ends.tolist() == [1, 3] and not asked
    assert groups.on_host == [1, 2] == groups.on_host and len(asked) == 1

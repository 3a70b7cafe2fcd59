"""The experts' products against each expert's own product in fp64, for any shares of the experts; planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.moe import MoE
from megatron.model.wgrads import WgradQueue
from megatron.ops import grouped_linear, resolve
from megatron.ops.expert_rows import RowGroups, by_expert, taken
from megatron.ops.grouped_linear import Grouped, Loop, by_grouped_mm, by_loop, least_rows
from tests.cluster.fake_device import fake_cuda
from tests.cluster.fake_run import fake_parts
from tests.helpers.runs import flags

IN, OUT = 16, 24
SHARES = {
    "uneven": [3, 11, 1, 5],
    "some without rows": [0, 7, 0, 0],
    "the first and the last without": [0, 4, 9, 0],
    "no rows at all": [0, 0, 0, 0],
    "one expert": [6],
}


def groups_of(counts: Sequence[int]) -> RowGroups:
    return RowGroups(torch.tensor(counts), sum(counts))


def given(counts: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, list[nn.Parameter], Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(sum(counts), IN, dtype=torch.float64, generator=generator)
    weights = [torch.randn(OUT, IN, dtype=torch.float64, generator=generator) for _ in counts]
    dy = torch.randn(sum(counts), OUT, dtype=torch.float64, generator=generator)
    return x.to(dtype).requires_grad_(), [nn.Parameter(weight.to(dtype)) for weight in weights], dy.to(dtype)


def expert_by_expert(counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """[y, dx, dweights...] by definition, in fp64 on the operation's inputs."""
    x, weights, dy = (value.detach().double() if isinstance(value, Tensor) else value for value in given(counts, dtype))
    y, dx, gradients, start = torch.zeros_like(dy), torch.zeros_like(x), [], 0
    for weight, count in zip(weights, counts, strict=True):
        wide, gradient = weight.detach().double(), torch.zeros(OUT, IN, dtype=torch.float64)
        for row in range(start, start + count):
            y[row], dx[row] = wide @ x[row], wide.t() @ dy[row]
            gradient += torch.outer(dy[row], x[row])
        gradients.append(gradient)
        start += count
    return [y, dx, *gradients]


def computed(op: Callable[..., Tensor], counts: Sequence[int], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    x, weights, dy = given(counts, dtype)
    y = op(x, groups_of(counts), weights, **options)
    y.backward(dy)
    assert x.grad is not None
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [y.detach(), x.grad, *gradients]


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest entry of each tensor."""
    pairs = [(a.double(), b) for a, b in zip(found, wanted, strict=True) if b.numel()]
    return max((((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item() for a, b in pairs), default=0.0)


def grouped(x: Tensor, counts: RowGroups, weights: Sequence[nn.Parameter]) -> Tensor:
    """The CUDA device's implementation, by PyTorch's same function on this device."""
    return grouped_linear._grouped_linear(Grouped, x, counts, weights, None)


@pytest.mark.parametrize("counts", SHARES.values(), ids=SHARES)
def test_every_expert_has_its_own_product(counts: list[int]) -> None:
    assert difference(computed(by_loop, counts, torch.float64), expert_by_expert(counts, torch.float64)) < 1e-13


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("counts", SHARES.values(), ids=SHARES)
def test_the_grouped_product_is_the_same(counts: list[int], dtype: torch.dtype, allowed: float) -> None:
    """The tolerance is the dtype's rounding; a row of a wrong expert would exceed it a hundredfold."""
    wanted = expert_by_expert(counts, dtype)
    assert difference(computed(grouped, counts, dtype), wanted) < allowed
    assert difference(computed(by_loop, counts, dtype), wanted) < allowed


def test_what_the_kernel_does_not_take_goes_through_the_loop() -> None:
    assert difference(computed(by_grouped_mm, [3, 2], torch.float64), expert_by_expert([3, 2], torch.float64)) < 1e-13


@pytest.mark.parametrize(("rows", "how"), [(5, Grouped), (0, Loop)])
def test_a_rank_whose_experts_nobody_chose_asks_for_no_grouped_product(rows: int, how: type) -> None:
    with fake_cuda() as device:
        x = torch.empty(rows, IN, dtype=torch.bfloat16, device=device)
        weights = [nn.Parameter(torch.empty(OUT, IN, dtype=torch.bfloat16, device=device)) for _ in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            asked: list[type] = []
            patch.setattr(grouped_linear, "_grouped_linear", lambda how, x, *_: asked.append(how) or x)
            by_grouped_mm(x, groups_of([rows, 0]), weights)
    assert asked == [how]


@pytest.mark.parametrize("axes", [{}, {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}])
def test_every_expert_has_a_row_on_a_gpu(axes: dict[str, int]) -> None:
    """The device's kernel needs one. Rows that travel are padded when they have arrived."""
    settings = {"num_experts": 4, "disable_bias_linear": True, "bf16": True, "moe_ffn_hidden_size": 48}
    with fake_parts(flags(**settings, **axes), 0, 2) as parts:
        found = [module.dispatcher for module in parts.engine.model.modules() if isinstance(module, MoE)]
    assert found
    for dispatcher in found:
        travels = "expert_model_parallel_size" in axes
        assert dispatcher.padding == (0 if travels else 1)
        assert not travels or dispatcher.padding_after_exchange == 1


def test_gradients_that_wait_in_a_queue() -> None:
    """Gradients appear only when the queue runs, and two passes add up."""
    counts, queue = [2, 0, 5], WgradQueue()
    x, weights, dy = given(counts, torch.float64)
    for _ in range(2):
        by_loop(x, groups_of(counts), weights, queue.put).backward(dy)
        queue.end_of_pass()
    assert all(weight.grad is None for weight in weights)
    queue.run()
    queue.run()
    wanted = expert_by_expert(counts, torch.float64)[2:]
    found = [weight.grad for weight in weights if weight.grad is not None]
    assert queue.empty and difference(found, [2 * gradient for gradient in wanted]) < 1e-13


def test_weights_side_by_side_are_not_copied() -> None:
    whole = torch.randn(3, 4, 5)
    assert grouped_linear._stacked(whole.unbind()).data_ptr() == whole.data_ptr()
    for apart in ([whole[0], whole[2], whole[1]], [part.clone() for part in whole]):
        stacked = grouped_linear._stacked(apart)
        assert torch.equal(stacked, torch.stack(apart)) and stacked.data_ptr() != whole.data_ptr()


def test_it_is_a_row_of_the_table() -> None:
    assert resolve("auto", "cuda").grouped_linear is by_grouped_mm
    for spec, device in (("auto", "cpu"), ("auto,-grouped_linear", "cuda"), ("ref", "cuda")):
        kernels = resolve(spec, device)
        assert kernels.grouped_linear is by_loop
        assert any(line.startswith("grouped_linear  ") for line in kernels.table().splitlines())


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def shifted(groups: RowGroups) -> RowGroups:
    """Planted bug: counts a row of the largest group as the next one's."""
    wrong = groups.counts.tolist()
    largest = wrong.index(max(wrong))
    wrong[largest] -= 1
    wrong[(largest + 1) % len(wrong)] += 1
    return groups_of(wrong)


@pytest.mark.parametrize("which", ["forward", "input_gradient", "weight_gradients"])
def test_a_row_of_the_next_group_is_seen(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(Loop, which)

    def wrong(first: Tensor, *rest: Any) -> Any:
        return right(first, *(shifted(value) if isinstance(value, RowGroups) else value for value in rest))

    monkeypatch.setattr(Loop, which, staticmethod(wrong))
    counts = SHARES["uneven"]
    found = computed(lambda x, n, w: grouped_linear._grouped_linear(Loop, x, n, w, None), counts, torch.float64)
    assert difference(found, expert_by_expert(counts, torch.float64)) > 1e-2


@pytest.mark.parametrize("padding", [least_rows(by_grouped_mm), 0])
def test_a_gradient_nobody_wrote_is_seen(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the device's kernel leaves the gradients of experts without rows unwritten. A row of zeros for every
    expert avoids that."""
    right = F.grouped_mm

    def unwritten(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        result = right(a, b, offs=offs)
        if result.ndim == 3:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return result

    monkeypatch.setattr(F, "grouped_mm", unwritten)
    counts = SHARES["some without rows"]
    x, weights, dy = given(counts, torch.float32)
    order = by_expert(torch.tensor([expert for expert, n in enumerate(counts) for _ in range(n)]), len(counts), padding)
    taken(grouped(taken(x, order), order.groups, weights), order.back).backward(dy)
    assert x.grad is not None
    found = [x.grad, *(weight.grad for weight in weights if weight.grad is not None)]
    if padding:
        assert difference(found, expert_by_expert(counts, torch.float32)[1:]) < 1e-5
    else:
        assert any(gradient.isnan().any() for gradient in found)

"""Weight gradients that arrive as products: the sums are those of plain backward, each counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.data_parallel import BucketStore
from megatron.data_parallel import bucket_store as module
from megatron.distributed.parallel_state import Axis
from megatron.model.linear import Linear
from megatron.model.wgrads import AddToParameter, WgradQueue, WgradRoute
from megatron.ops import resolve, wgrad
from megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts

ALONE = Axis.single("dp")


class Net(nn.Module):
    """Linear layers of all kinds; `tied` also uses a weight outside any layer."""

    def __init__(self, tied: bool, route: WgradRoute) -> None:
        super().__init__()
        self.route = route
        self.first = Linear(6, 8, bias=True, wgrads=route)
        self.column = ColumnParallelLinear(8, 8, axis=Axis.single("tp"), wgrads=route)
        self.row = RowParallelLinear(8, 8, axis=Axis.single("tp"), bias=False, wgrads=route)
        self.twice = Linear(8, 8, bias=False, wgrads=route)
        self.tied = self.twice.weight if tied else None
        for number, p in enumerate(self.parameters()):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(number))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.row(torch.tanh(self.column(self.first(x)))))
        return x if self.tied is None else x @ self.tied


def make(
    dtype: torch.dtype, *, tied: bool = False, products: bool = True, route: WgradRoute | None = None
) -> tuple[Net, BucketStore]:
    net = Net(tied, route or WgradRoute()).to(dtype)
    if tied:
        net.tied = net.twice.weight
    grads = BucketStore(net.named_parameters(), ALONE, flat=True, accumulate=wgrad.accumulate)
    if products:
        net.route.connect(grads, net)
    return net, grads


def backward(net: Net, seed: int) -> None:
    x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(seed)).to(next(net.parameters()).dtype)
    net(x.requires_grad_()).float().square().sum().backward()


def sums(dtype: torch.dtype, *, micro_batches: int = 3, **how: Any) -> dict[str, Tensor]:
    """Sums after two steps; the second step overwrites the first one's numbers."""
    net, grads = make(dtype, **how)
    for step in range(2):
        grads.zero()
        for seed in range(micro_batches):
            backward(net, 10 * step + seed)
        grads.reduce()
    return {name: grad.clone() for name, grad in grads.grads()}


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(
        ((one[name].double() - other[name].double()).norm() / other[name].double().norm()).item() for name in one
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.0)])
def test_the_sums_are_those_of_backward(dtype: torch.dtype, gate: float, micro_batches: int, tied: bool) -> None:
    """bf16 on a CPU matches bit for bit: the product is the same, then widened and added."""
    ours = sums(dtype, micro_batches=micro_batches, tied=tied)
    assert worst(ours, sums(dtype, micro_batches=micro_batches, tied=tied, products=False)) <= gate


def test_who_sends_products() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    net, _ = make(torch.float32)
    assert all(net.route.takes(x, layer.weight) for layer in (net.first, net.column, net.row, net.twice))
    net, _ = make(torch.float32, tied=True)
    assert net.route.takes(x, net.first.weight)
    assert not net.route.takes(x, net.twice.weight), "its weight has two gradients"
    net, _ = make(torch.float32, products=False)
    assert not net.route.takes(x, net.first.weight), "nobody takes products"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_first", [False, True])
def test_a_product_beside_a_gradient_of_backward(dtype: torch.dtype, backward_first: bool) -> None:
    """Products and a gradient of backward for one weight add up in either order."""
    weight = nn.Parameter(torch.randn(4, 3).to(dtype))
    grads = BucketStore([("w", weight)], ALONE, flat=True, accumulate=wgrad.accumulate)
    g, x = torch.randn(5, 4).to(dtype), torch.randn(5, 3).to(dtype)
    steps: list[Callable[[], Any]] = [lambda: grads.put(weight, g, x), lambda: weight.sum().backward()]
    for _ in range(2):
        grads.zero()
        for step in steps[::-1] if backward_first else steps:
            step()
        grads.reduce()
        torch.testing.assert_close(grads.grad("w"), (g.t() @ x).float() + 1)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_accumulate_writes_or_refuses(grad_dtype: torch.dtype) -> None:
    into, g, x = torch.full((4, 3), 7.0), torch.randn(5, 4).to(grad_dtype), torch.randn(5, 3).to(grad_dtype)
    done = wgrad.accumulate(into, g, x, False)
    assert done == (grad_dtype == torch.float32), "a CPU has no product of bf16 that adds to fp32"
    if not done:
        assert torch.equal(into, torch.full((4, 3), 7.0))
        return
    torch.testing.assert_close(into, g.t() @ x)
    wgrad.accumulate(into, g, x, True)
    torch.testing.assert_close(into, 2 * (g.t() @ x))
    empty = torch.empty(0, 4), torch.empty(0, 3)
    wgrad.accumulate(into, *empty, True)
    torch.testing.assert_close(into, 2 * (g.t() @ x))
    wgrad.accumulate(into, *empty, False)
    assert not into.any(), "no token, no gradient"


def test_the_queue_hands_products_on_pass_by_pass() -> None:
    queue = WgradQueue()
    net, grads = make(torch.float64, route=queue)
    grads.zero()
    for seed in (0, 1):
        backward(net, seed)
        queue.end_of_pass()
    before = {name: grads.grad(name).clone() for name in ("first.weight", "column.weight")}
    queue.run(), queue.run()
    assert queue.empty and not any(part.any() for part in before.values())
    grads.reduce()
    plain, theirs = make(torch.float64, products=False)
    theirs.zero()
    for seed in (0, 1):
        backward(plain, seed)
    theirs.reduce()
    assert worst(dict(grads.grads()), dict(theirs.grads())) < 1e-14


def test_a_compiled_or_frozen_layer_is_left_to_backward() -> None:
    net, _ = make(torch.float32)
    net.first.weight.requires_grad_(False)
    x = torch.randn(2, 6, requires_grad=True)
    assert type(net.first(x).grad_fn).__name__ != "_LinearBackward"
    with torch.no_grad():
        assert net.column(torch.randn(2, 8)).grad_fn is None
    assert type(net.twice(torch.randn(2, 8)).grad_fn).__name__ != "_LinearBackward", "its input has no gradient"


def test_a_hook_on_a_weight_still_sees_its_gradient() -> None:
    net, grads = make(torch.float64)
    plain = sums(torch.float64, micro_batches=1)
    net.first.weight.register_hook(lambda grad: 2 * grad)
    grads.zero()
    backward(net, 10)
    grads.reduce()
    torch.testing.assert_close(grads.grad("first.weight"), 2 * plain["first.weight"])
    torch.testing.assert_close(grads.grad("column.weight"), plain["column.weight"])


def with_overlap(rank: int, size: int, products: bool) -> tuple[list[float], list[Tensor]]:
    torch.set_num_threads(1)
    spec = "auto,-adamw,-grad_norm" + ("" if products else ",-wgrad_accumulation")
    argv = flags(overlap_grad_reduce=True, kernels=spec, micro_batch_size=1, attention_dropout=0, hidden_dropout=0)
    _, parts = make_parts(argv, rank=rank, world_size=size, dtype=torch.float64)
    engine = parts.trainer.engine
    small = BucketStore(
        engine.model.named_parameters(),
        engine.parallel.dp_cp,
        overlap=True,
        bucket_size=2000,
        flat=True,
        accumulate=parts.trainer.engine.store._accumulate,
    )
    engine.store.close()
    engine.store = engine.optimizer.store = small
    engine.optimizer._update._grads = small  # type: ignore[attr-defined]
    if products:
        engine.model.make.wgrads.connect(small, engine.model)
    losses = [parts.trainer.iterate().lm_loss for _ in range(3)]  # type: ignore[union-attr]
    return losses, [p.detach().clone() for p in engine.model.parameters()]


def test_buckets_are_reduced_early_only_when_all_products_are_there() -> None:
    """Many small buckets, several micro-batches: a late gradient is an error, an extra one a wrong sum."""
    found = [run_ranks(2, with_overlap, 2, products)[0] for products in (True, False)]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_table_says_what_happens() -> None:
    choice = {c.op: c for c in resolve("auto", "cpu").choices}["wgrad_accumulation"]
    assert choice.backend == "torch" and "straight into the gradient buffer" in choice.reason
    assert resolve("ref", "cpu").wgrad_accumulation is None
    assert resolve("auto,-wgrad_accumulation", "cpu").wgrad_accumulation is None


# mistakes that must be seen


def plant_added_twice(patch: pytest.MonkeyPatch) -> None:
    put = BucketStore.put

    def twice(self: BucketStore, *product: Any) -> None:
        put(self, *product)
        put(self, *product)

    patch.setattr(BucketStore, "put", twice)


def plant_announced_by_backward_too(patch: pytest.MonkeyPatch) -> None:
    """Planted bug: backward returns the gradient of a product that was sent."""
    put = BucketStore.put

    def both(self: BucketStore, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        put(self, parameter, grad, x)
        assert parameter.grad is not None
        parameter.grad += grad.t() @ x
        self._on_gradient(self._slot_of[id(parameter)], parameter)

    patch.setattr(BucketStore, "put", both)


def plant_first_is_added_to_the_last_step(patch: pytest.MonkeyPatch) -> None:
    accumulate = wgrad.accumulate
    patch.setattr(wgrad, "accumulate", lambda into, grad, x, add: accumulate(into, grad, x, True))


def plant_later_ones_overwrite(patch: pytest.MonkeyPatch) -> None:
    accumulate = wgrad.accumulate
    patch.setattr(wgrad, "accumulate", lambda into, grad, x, add: accumulate(into, grad, x, False))


def plant_tied_weight_missed(patch: pytest.MonkeyPatch) -> None:
    """Planted bug: drops the gradient of backward for a weight with products."""
    patch.setattr(
        module.BucketStore, "_on_gradient", lambda self, slot, parameter: setattr(parameter, "grad", slot.view)
    )
    patch.setattr("megatron.model.wgrads.Counter", lambda _: {})


PLANTS = [
    plant_added_twice,
    plant_announced_by_backward_too,
    plant_first_is_added_to_the_last_step,
    plant_later_ones_overwrite,
    plant_tied_weight_missed,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    right = sums(torch.float64, tied=True, products=False)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert worst(sums(torch.float64, tied=True), right) > 1e-3


def test_a_parameter_outside_the_buffers_gets_its_gradient() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    for _ in range(2):
        AddToParameter().put(weight, torch.ones(5, 4), torch.ones(5, 3))
    assert weight.grad is not None and (weight.grad == 10).all()

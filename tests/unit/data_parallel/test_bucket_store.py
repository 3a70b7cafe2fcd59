"""Gradient buffers in one process: their memory, their count of zeros, and misuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis

ALONE = Axis.single("dp")


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model(x).float().square().sum().backward()


def summed(dtype: torch.dtype, seeds: range) -> dict[str, torch.Tensor]:
    """Sum of each backward pass's gradient in double precision."""
    total: dict[str, torch.Tensor] = {}
    for seed in seeds:
        model = make_model(dtype)
        backward(model, seed)
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] = total.get(name, torch.zeros(())) + p.grad.double()
    return total


@pytest.mark.parametrize(
    ("dtype", "gate"), [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)]
)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_accumulation(dtype: torch.dtype, gate: float, micro_batches: int) -> None:
    model = make_model(dtype)
    grads = BucketStore(model.named_parameters(), ALONE)
    for start in (0, 10):  # two steps: the second overwrites the first
        grads.zero()
        for seed in range(start, start + micro_batches):
            backward(model, seed)
        grads.reduce()
        for name, wanted in summed(dtype, range(start, start + micro_batches)).items():
            found = grads.grad(name)
            assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert ((found.double() - wanted).norm() / wanted.norm()).item() < gate


def test_one_rank_in_full_precision_leaves_gradients_where_backward_put_them() -> None:
    model = make_model()
    grads = BucketStore(model.named_parameters(), ALONE)
    backward(model, 0)
    before = {name: p.grad for name, p in model.named_parameters()}
    grads.reduce()
    assert all(grads.grad(name) is grad for name, grad in before.items())
    assert not grads._buckets and not grads._hooks


def test_a_wide_half_gradient_is_added_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data_parallel.bucket_store._SCRATCH_SIZE", 7)
    test_accumulation(torch.bfloat16, 1e-6, 3)


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype)
        model.extra = nn.Parameter(torch.ones(3, dtype=dtype))
        grads = BucketStore(model.named_parameters(), ALONE)
        backward(model, 0)
        (model.extra * 2).sum().backward()
        grads.reduce()
        assert grads.grad("extra").tolist() == [2, 2, 2]
        grads.zero()
        backward(model, 0)
        grads.reduce()
        assert grads.grad("extra").tolist() == [0, 0, 0]


def test_tied_and_frozen_parameters() -> None:
    model = make_model(torch.bfloat16)
    model.register_parameter("again", model[0].weight)
    model[2].bias.requires_grad_(False)
    named = [*model.named_parameters(), ("tied", model[0].weight)]
    grads = BucketStore(named, ALONE)
    assert set(grads.names) == {"0.bias", "2.weight", named[0][0]}
    backward(model, 0)
    assert grads.grad("tied") is grads.grad(named[0][0])
    assert grads.parameter("tied") is model[0].weight


def test_grad_is_a_view_that_can_be_written() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype)
        grads = BucketStore(model.named_parameters(), ALONE)
        backward(model, 0)
        grads.reduce()
        grads.grad("0.bias").fill_(7.0)
        grads.multiply(0.5)
        assert grads.grad("0.bias").tolist() == [3.5] * 4
        assert dict(grads.grads())["0.bias"].tolist() == [3.5] * 4


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True).to(torch.bfloat16)
    grads = BucketStore(model.named_parameters(), ALONE)
    model(torch.tensor([1, 1, 3])).sum().backward()
    grads.reduce()
    assert grads.grad("weight").sum(dim=1).tolist() == [0, 4, 0, 2, 0]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph() -> None:
    """create_graph makes backward replace p.grad instead of adding to it in place."""
    model = make_model(torch.float32)
    grads = BucketStore(model.named_parameters(), Axis("dp", 0, 2, (0, 1)))  # buffers, but never reduced
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward(create_graph=True)
    once = make_model(torch.float32)
    once(torch.ones(1, 3)).sum().backward()
    for name, p in once.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(grads.grad(name).detach(), 2 * p.grad)


def test_reducing_twice_is_refused() -> None:
    grads = BucketStore(make_model().named_parameters(), ALONE)
    grads.reduce()
    with pytest.raises(AssertionError, match="called twice in one step"):
        grads.reduce()
    grads.zero()
    grads.reduce()


def test_a_late_gradient_is_refused() -> None:
    model = make_model(torch.bfloat16)
    grads = BucketStore(model.named_parameters(), ALONE)
    backward(model, 0)
    grads.reduce()
    with pytest.raises(RuntimeError, match=r"gradient of 2\.(weight|bias) arrived after its sum"):
        backward(model, 1)


def test_close_takes_the_hooks_off() -> None:
    model = make_model(torch.bfloat16)
    grads = BucketStore(model.named_parameters(), ALONE)
    grads.close()
    backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())


def test_buckets_follow_backward_and_keep_types_apart() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4)])
    grads = BucketStore(model.named_parameters(), Axis("dp", 0, 2, (0, 1)), bucket_size=30)
    assert [list(bucket.places) for bucket in grads._buckets] == [
        ["1.bias", "1.weight"],
        ["2.bias", "2.weight", "0.bias", "0.weight"],
    ]
    assert [bucket.buffer.numel() for bucket in grads._buckets] == [20, 40]
    assert [bucket.buffer.dtype for bucket in grads._buckets] == [torch.float64, torch.float32]
    small = BucketStore(model.named_parameters(), Axis("dp", 0, 2, (0, 1)), bucket_size=1)
    assert [next(iter(bucket.places)) for bucket in small._buckets][:2] == ["2.bias", "2.weight"]
    assert len(small._buckets) == 6

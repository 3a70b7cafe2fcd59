"""Data parallelism in fp64 against one process that sees the whole batch, and against torch's own DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megatron.data_parallel import BucketStore, broadcast_parameters, buckets
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.layout import Layout
from tests.helpers.distributed import run_ranks

SAMPLES, SEQUENCE, VOCAB, WIDTH = 8, 6, 13, 8
GATE = 1e-10


class TinyLM(nn.Module):
    """Tied embedding and head, a frozen parameter, one that is never used, and a recomputed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.frozen
        inner = checkpoint(lambda x: torch.tanh(self.first(x)), hidden, use_reentrant=False)
        return self.head(self.norm(hidden + self.second(inner)))


def make_model(dtype: torch.dtype = torch.float64) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM().to(dtype)


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels, and a mask that counts from none to all of a sample's tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQUENCE + 1), generator=generator)
    mask = torch.arange(SEQUENCE).expand(SAMPLES, SEQUENCE) < (torch.arange(SAMPLES) % (SEQUENCE + 1))[:, None]
    return tokens[:, :-1], tokens[:, 1:], mask


def loss_sum(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = nn.functional.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
    return (losses * mask).sum() / (SAMPLES * SEQUENCE)


def reference(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    model = make_model(dtype)
    loss_sum(model, *make_batch()).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def parallel_grads(
    rank: int, world: int, micro_batches: int, overlap: bool, bucket_size: int, steps: int = 2
) -> dict[str, torch.Tensor]:
    model = make_model()
    state = ParallelState.build(Layout(world), rank)
    grads = BucketStore(model.named_parameters(), state.dp, bucket_size=bucket_size, overlap=overlap)
    part = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    pieces = [t[part].chunk(micro_batches) for t in make_batch()]
    for _ in range(steps):  # a second step must not remember the first
        grads.zero()
        for index, micro in enumerate(zip(*pieces, strict=True)):
            if index == micro_batches - 1:
                grads.arm()
            loss_sum(model, *micro).backward()
        grads.reduce()
    return {name: grad.clone() for name, grad in grads.grads()}


def relative_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(
        ((found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-300)).item()
        for name, value in wanted.items()
    )


@pytest.mark.parametrize(
    ("world", "micro_batches", "overlap", "bucket_size"),
    [(2, 1, False, 10**9), (2, 4, True, 1), (2, 2, True, 150), (4, 2, True, 100), (4, 1, False, 1), (4, 2, False, 250)],
)
def test_equals_one_process(world: int, micro_batches: int, overlap: bool, bucket_size: int) -> None:
    wanted = reference()
    results = run_ranks(world, parallel_grads, world, micro_batches, overlap, bucket_size)
    for found in results:
        assert relative_error(found, wanted) < GATE
        assert all(torch.equal(found[name], results[0][name]) for name in found), "the ranks differ"


def test_overlap_changes_no_bit() -> None:
    late, early = (run_ranks(2, parallel_grads, 2, 2, overlap, 100)[0] for overlap in (False, True))
    assert all(torch.equal(late[name], early[name]) for name in late)


def plant_missing_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets.collectives, "start_all_reduce", lambda tensor, axis: None)


def plant_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = BucketStore._launch_next

    def mean(self: BucketStore) -> None:
        self._buckets[self._next_bucket].buffer.div_(self._buckets[self._next_bucket].axis.size)
        launch(self)

    monkeypatch.setattr(BucketStore, "_launch_next", mean)


def plant_overwritten_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    move = BucketStore._on_gradient

    def overwrite(self: BucketStore, slot: buckets.GradientSlot, parameter: nn.Parameter) -> None:
        move(self, slot, parameter)
        parameter.grad = None  # the next micro-batch starts anew

    monkeypatch.setattr(BucketStore, "_on_gradient", overwrite)


def plant_stale_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: BucketStore, slot: buckets.GradientSlot) -> None:
        slot.filled = True

    monkeypatch.setattr(BucketStore, "_fill_with_zeros", keep)
    make = buckets._make_bucket

    def dirty(*args: object) -> buckets.Bucket:
        bucket = make(*args)  # type: ignore[arg-type]
        bucket.buffer.fill_(3.0)
        return bucket

    monkeypatch.setattr(buckets, "_make_bucket", dirty)


@pytest.mark.parametrize(
    "plant", [plant_missing_reduction, plant_mean, plant_overwritten_micro_batch, plant_stale_buffer]
)
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = reference()
    plant(monkeypatch)
    found = run_ranks(2, parallel_grads, 2, 2, True, 100)[0]
    assert relative_error(found, wanted) > 1e-3


def against_torch_ddp(rank: int) -> float:
    """DDP averages over the ranks: half of our sum over 2 ranks."""
    ours, theirs = make_model(torch.float32), make_model(torch.float32)
    state = ParallelState.build(Layout(2), rank)
    grads = BucketStore(ours.named_parameters(), state.dp)
    wrapped = DistributedDataParallel(theirs, find_unused_parameters=True)
    part = [t[rank * 4 : rank * 4 + 4] for t in make_batch()]
    loss_sum(ours, *part).backward()
    loss_sum(wrapped, *part).backward()
    grads.reduce()
    wanted = {n: torch.zeros_like(p) if p.grad is None else 2 * p.grad for n, p in theirs.named_parameters()}
    return relative_error(dict(grads.grads()), {name: wanted[name] for name in grads.names})


def test_equals_torch_ddp() -> None:
    assert max(run_ranks(2, against_torch_ddp)) < 1e-6


def half_grads(rank: int, dtype: torch.dtype) -> tuple[float, bool]:
    """Half-precision gradients of several micro-batches are added in fp32, exactly the sum of the single ones."""
    model = make_model(dtype)
    state = ParallelState.build(Layout(2), rank)
    grads = BucketStore(model.named_parameters(), state.dp)
    tokens, labels, mask = make_batch()
    total: dict[str, torch.Tensor] = {}
    for sample in range(SAMPLES):
        plain = make_model(dtype)
        loss_sum(plain, *(t[sample : sample + 1] for t in (tokens, labels, mask))).backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.double()
    for sample in range(rank * 4, rank * 4 + 4):
        loss_sum(model, *(t[sample : sample + 1] for t in (tokens, labels, mask))).backward()
    grads.reduce()
    error = max(((grads.grad(n).double() - t).norm() / t.norm()).item() for n, t in total.items())
    return error, all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_add_up_in_fp32(dtype: torch.dtype) -> None:
    for error, dropped in run_ranks(2, half_grads, dtype):
        assert error < 1e-6, "bf16 alone would be off by 1e-3"
        assert dropped, "p.grad would hold a second copy"


def uneven_use(rank: int) -> list[float]:
    """Only one rank uses a layer, under overlap: the collectives still match, and the other rank adds zero."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3).double() for _ in range(3)])
    state = ParallelState.build(Layout(2), rank)
    grads = BucketStore(layers.named_parameters(), state.dp, bucket_size=1, overlap=True)
    grads.zero()
    grads.arm()
    x = torch.ones(1, 3, dtype=torch.float64)
    used = layers if rank == 0 else [layers[2], layers[0]]
    for layer in used:
        x = layer(x)
    x.sum().backward()
    grads.reduce()
    return [grad.sum().item() for _, grad in grads.grads()]


def test_a_layer_that_one_rank_skips() -> None:
    one, two = run_ranks(2, uneven_use)
    assert one == two and all(abs(value) > 0 for value in one)


def broadcast(rank: int) -> list[float]:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    model.weight.data = model.weight.data.t().contiguous().t()  # not contiguous
    state = ParallelState.build(Layout(2), rank)
    broadcast_parameters(model.named_parameters(), state.dp)
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_broadcast_parameters_takes_the_first_ranks() -> None:
    one, two = run_ranks(2, broadcast)
    torch.manual_seed(0)
    assert one == two == [value for p in nn.Linear(3, 2).parameters() for value in p.flatten().tolist()]


def own_group(rank: int) -> float:
    """The user's own process group: ranks 1 and 3 of 4."""
    group = torch.distributed.new_group([1, 3])
    if rank not in (1, 3):
        return 0.0
    model = nn.Linear(2, 1, bias=False)
    grads = BucketStore(model.named_parameters(), Axis("mine", (1, 3).index(rank), 2, (1, 3), group))
    model(torch.full((1, 2), float(rank))).sum().backward()
    grads.reduce()
    return grads.grad("weight")[0, 0].item()


def test_a_group_of_the_users_own() -> None:
    assert run_ranks(4, own_group) == [0.0, 4.0, 0.0, 4.0]

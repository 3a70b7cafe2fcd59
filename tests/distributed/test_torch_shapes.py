"""`DistributedDataParallel`, `OSS` and `ShardedDataParallel` beside torch's own DDP and optimizers, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from megatron.compat import OSS, DistributedDataParallel, ShardedDataParallel, initialize
from megatron.compat.any_model import ModelEngine
from megatron.compat.fairscale import oss
from megatron.errors import ConfigError
from tests.helpers.any_model import Tiny, batch_of, largest_difference, make_model, weights_of
from tests.helpers.distributed import run_ranks

GATE, STEPS, MICRO = 1e-10, 5, 2


def without_unused(norm: bool = True) -> Tiny:
    model = make_model(norm=norm)
    model.unused.requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # which reads gradients by places in memory


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int, accumulation: int = 1) -> None:
    """The usual training loop of both types; all but the last micro-batch of a step skip the reduction."""
    for step in range(STEPS):
        images, labels = (part.chunk(ranks)[rank] for part in batch_of(step, ranks * accumulation * MICRO))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        *first, (image, label) = zip(images.split(MICRO), labels.split(MICRO), strict=True)
        for earlier in first:
            with model.no_sync():
                F.cross_entropy(model(earlier[0]), earlier[1]).backward()
        F.cross_entropy(model(image), label).backward()
        optimizer.step()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def beside_ddp(rank: int, ranks: int, accumulation: int, unused: bool, bucket_cap_mb: float) -> tuple[float, float]:
    ours, theirs = (make_model(norm=True) if unused else without_unused() for _ in range(2))
    if rank:  # both take the first rank's values
        nn.init.ones_(ours.out.bias)
        nn.init.ones_(theirs.out.bias)
    mine = DistributedDataParallel(ours, find_unused_parameters=unused, bucket_cap_mb=bucket_cap_mb)
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=unused)
    train(mine, adamw(mine), rank, ranks, accumulation)
    train(wrapped, adamw(wrapped), rank, ranks, accumulation)
    assert mine.state_dict().keys() == wrapped.state_dict().keys()
    mine.eval(), wrapped.eval()
    with torch.no_grad():
        images, _ = batch_of(99, 3)
        outputs = (mine(images) - wrapped(images)).abs().max().item()
    grads = largest_difference(gradients(mine), gradients(wrapped))
    return max(outputs, grads), largest_difference(weights_of(mine), weights_of(wrapped))


@pytest.mark.parametrize(
    ("ranks", "accumulation", "unused", "cap"),
    [(2, 1, False, 25.0), (2, 3, False, 1e-3), (2, 2, True, 1e-3), (3, 1, True, 25.0)],
)
def test_ddp_equals_torchs(ranks: int, accumulation: int, unused: bool, cap: float) -> None:
    for outputs, weights in run_ranks(ranks, beside_ddp, ranks, accumulation, unused, cap):
        assert outputs < GATE and weights < GATE


def in_bf16(rank: int) -> float:
    """Gradients have the parameters' dtype, as in torch, and differ only by the order of rounding."""
    ours, theirs = (nn.Linear(8, 8).to(torch.bfloat16) for _ in range(2))
    mine, wrapped = DistributedDataParallel(ours), nn.parallel.DistributedDataParallel(theirs)
    theirs.load_state_dict(ours.state_dict())
    x = torch.full((2, 8), 1.0 + rank, dtype=torch.bfloat16)
    for model in (mine, wrapped):
        model(x).float().square().mean().backward()
    assert ours.weight.grad is not None and ours.weight.grad.dtype == torch.bfloat16
    found, wanted = gradients(ours), gradients(theirs)
    return largest_difference(found, wanted) / max(one.abs().max().item() for one in wanted.values())


def test_ddp_in_half_precision() -> None:
    assert max(run_ranks(2, in_bf16)) < 2**-7, "one bit of bf16"


class TwoWays(nn.Module):
    """Each rank uses a different branch; the third is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x)


def two_ways(rank: int) -> float:
    torch.manual_seed(0)
    ours = TwoWays()
    theirs = TwoWays()
    theirs.load_state_dict(ours.state_dict())
    mine = DistributedDataParallel(ours, find_unused_parameters=True)
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    for model in (mine, wrapped):
        optimizer = adamw(model)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + step, dtype=torch.float64), rank if step else 0).square().sum().backward()
            optimizer.step()
    assert ours.branches[2].weight.grad is None
    assert gradients(mine).keys() == gradients(wrapped).keys()
    return largest_difference(weights_of(mine), weights_of(wrapped))


def test_ddp_with_a_branch_for_each_rank() -> None:
    assert max(run_ranks(2, two_ways)) < GATE


def left_without_a_gradient(rank: int) -> list[str]:
    said = []
    model = DistributedDataParallel(make_model())
    images, labels = batch_of(0, 2)
    F.cross_entropy(model(images), labels).backward()
    for call in (
        lambda: model(images),
        lambda: model.join(),
        lambda: DistributedDataParallel(model, device_ids=[rank]),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        said.append(str(error.value))
    return said


def test_ddp_says_what_is_wrong() -> None:
    unused, join, devices = run_ranks(2, left_without_a_gradient)[0]
    assert "no gradient to unused" in unused and "find_unused_parameters=True" in unused
    assert "DistributedSampler" in join
    assert "device_ids [0]" in devices and "remove device_ids" in devices


class Returns(nn.Module):
    """Uses `first` and returns its output inside a container; `second` is unused."""

    def __init__(self, within: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
        self.within = within

    def forward(self, x: Tensor) -> Any:
        return self.within(self.first(x))


@dataclass
class Answer:
    logits: Tensor
    more: Any = None


class Pair(NamedTuple):
    logits: Tensor
    more: Any


WITHIN: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (Answer, lambda found: found.logits),
    (lambda x: [{"a": Answer(x)}, None], lambda found: found[0]["a"].logits),
    (lambda x: Pair(x, 3), lambda found: found.logits),
    (lambda x: CausalLMOutput(logits=x), lambda found: found.logits),
    (lambda x: Answer(torch.zeros(1), more=Pair(torch.zeros(1), {"b": (x,)})), lambda found: found.more.more["b"][0]),
]


def found_in_outputs(rank: int) -> tuple[float, str]:
    """The largest difference from torch over all kinds of outputs, and the error for an output that hides its
    tensors."""
    differences = []
    for within, of in WITHIN:
        torch.manual_seed(0)
        ours = Returns(within)
        theirs = copy.deepcopy(ours)
        mine = DistributedDataParallel(ours, find_unused_parameters=True)
        wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
        for model in (mine, wrapped):
            of(model(torch.full((2, 3), 1.0 + rank, dtype=torch.float64))).square().sum().backward()
        assert ours.second.weight.grad is None
        differences.append(largest_difference(gradients(ours), gradients(theirs)))
    hiding = DistributedDataParallel(Returns(lambda x: SimpleNamespace(x=x)), find_unused_parameters=True)
    with pytest.raises(ConfigError) as error:
        hiding(torch.ones(2, 3, dtype=torch.float64)).x.sum().backward()
    return max(differences), str(error.value)


def test_ddp_finds_the_tensors_that_torchs_finds() -> None:
    for difference, said in run_ranks(2, found_in_outputs):
        assert difference < GATE
        assert "did not find first." in said and "dataclasses" in said and "\n" not in said


UNUSUAL = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 complex64 complex128"
NARROW = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"


class Buffers(nn.Module):
    """One buffer of each dtype, in an order that aligns none of them, and one lazily negated view."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fixed = nn.Parameter(torch.full((3,), value, dtype=torch.int16), requires_grad=False)
        for name in ("uint8", *UNUSUAL.split(), *NARROW.split()):
            self.register_buffer(f"of_{name}", torch.full((1, 3), value).to(getattr(torch, name)).t())
        self.register_buffer("scalar", torch.tensor(value, dtype=torch.int16))
        self.register_buffer("conjugate", torch.full((3,), value * 1j, dtype=torch.complex64).conj())
        self.register_buffer("empty", torch.empty(0, dtype=torch.uint16))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def unusual_types(rank: int) -> list[str]:
    """Names of tensors that differ from the first rank's."""
    wrong, wanted = [], dict(Buffers(1).named_buffers())
    for make in (
        DistributedDataParallel,
        lambda model: ShardedDataParallel(model, OSS(model.linear.parameters(), lr=0.1)),
        lambda model: initialize(
            model=model, config={"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        )[0],
    ):
        model = Buffers(1 + rank)
        wrapped = make(model)
        for again in (False, True):
            if again:  # before the forward pass that shares them, or after the update
                for buffer in model.buffers():
                    buffer.copy_(torch.full(buffer.shape, 1 + rank).to(buffer.dtype))
                wanted["conjugate"] = torch.ones(3, dtype=torch.complex64)
                loss = wrapped(torch.ones(2, 2)).sum()
                wrapped.backward(loss) if isinstance(wrapped, ModelEngine) else loss.backward()
                if isinstance(wrapped, ModelEngine):
                    wrapped.step()
            else:
                wanted["conjugate"] = torch.full((3,), -1j, dtype=torch.complex64)
            wrong += [name for name, one in model.named_buffers() if one.tolist() != wanted[name].tolist()]
        wrong += ["fixed"] * (model.fixed.tolist() != [1, 1, 1])
    return wrong


def test_buffers_of_every_type_are_those_of_the_first_rank() -> None:
    assert run_ranks(2, unusual_types) == [[], []]


# the sharded pair


def sharded_weights(
    rank: int, ranks: int, kind: type[torch.optim.Optimizer], accumulation: int, size: int
) -> tuple[dict[str, Tensor], list[int]]:
    model = without_unused(norm=False)
    groups = [
        {"params": [model.out.weight], "lr": 1e-3},
        {"params": [p for p in model.parameters() if p is not model.out.weight]},
    ]
    optimizer = OSS(groups, optim=kind, lr=1e-2)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=size)
    train(wrapped, optimizer, rank, ranks, accumulation)
    return weights_of(model), [one.grad is not None for one in optimizer.parameters if one.requires_grad]


def plain_weights(kind: Callable[..., torch.optim.Optimizer], samples: int) -> dict[str, Tensor]:
    model = without_unused(norm=False)
    groups = [
        {"params": [model.out.weight], "lr": 1e-3},
        {"params": [p for p in model.parameters() if p is not model.out.weight]},
    ]
    optimizer = kind(groups, lr=1e-2)
    for step in range(STEPS):
        images, labels = batch_of(step, samples)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize(
    ("ranks", "kind", "accumulation", "size"),
    [(2, torch.optim.AdamW, 1, 2**23), (2, torch.optim.AdamW, 1, 100), (3, torch.optim.SGD, 1, 2**23)],
)
def test_the_sharded_pair_equals_one_process(ranks: int, kind: Any, accumulation: int, size: int) -> None:
    wanted = plain_weights(kind, ranks * accumulation * MICRO)
    results = run_ranks(ranks, sharded_weights, ranks, kind, accumulation, size)
    for found, _ in results:
        assert largest_difference(found, wanted) < GATE
    owned = list(zip(*(has for _, has in results), strict=True))
    assert all(sum(ranks_) == 1 for ranks_ in owned), "each gradient is on the rank that owns it, and on no other"


def accumulated(rank: int) -> list[dict[str, Tensor]]:
    """Gradients accumulate under no_sync() and without zero_grad(), as in torch's DDP with a plain optimizer."""
    found = []
    for sharded in (True, False):
        model = without_unused(norm=False)
        optimizer: Any = OSS(model.parameters(), torch.optim.AdamW, lr=1e-2) if sharded else adamw(model)
        wrapped: Any = ShardedDataParallel(model, optimizer) if sharded else nn.parallel.DistributedDataParallel(model)
        train(wrapped, optimizer, rank, 2, accumulation=2)
        for step in range(2):  # without zero_grad()
            images, labels = (part.chunk(2)[rank] for part in batch_of(step, 4))
            F.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        found.append(weights_of(model))
    return found


def test_the_sharded_pair_adds_up_as_ddp_does() -> None:
    for ours, theirs in run_ranks(2, accumulated):
        assert largest_difference(ours, theirs) < GATE


def clipped(rank: int) -> tuple[float, float]:
    model, plain = without_unused(norm=False), without_unused(norm=False)
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-2)
    wrapped = ShardedDataParallel(model, optimizer)
    images, labels = batch_of(0, 4)
    F.cross_entropy(wrapped(images.chunk(2)[rank]), labels.chunk(2)[rank]).backward()
    norm = optimizer.clip_grad_norm(0.05)
    optimizer.step()
    reference = adamw(plain)
    F.cross_entropy(plain(images), labels).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    reference.step()
    return abs(norm - wanted).item(), largest_difference(weights_of(model), weights_of(plain))


def test_oss_clips_the_norm_of_all_gradients() -> None:
    for norm, weights in run_ranks(2, clipped):
        assert norm < GATE and weights < 1e-10


def cycled(rank: int) -> float:
    """OneCycleLR changes the rate and the betas of the groups; it looks for the betas in `defaults`."""
    weights = []
    for sharded in (True, False):
        model = without_unused(norm=False)
        optimizer: Any = OSS(model.parameters(), torch.optim.AdamW, lr=1e-2) if sharded else adamw(model)
        wrapped: Any = ShardedDataParallel(model, optimizer) if sharded else model
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=4)
        for step in range(4):
            images, labels = batch_of(step, 4)
            own = slice(2 * rank, 2 * rank + 2) if sharded else slice(None)
            F.cross_entropy(wrapped(images[own]), labels[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 3:
                schedule.step()
        weights.append(weights_of(model))
    return largest_difference(*weights)


def test_oss_follows_a_schedule_of_rate_and_betas() -> None:
    assert max(run_ranks(2, cycled)) < GATE


def moved_state(rank: int) -> list[bool]:
    """The consolidated state is a plain optimizer's: it loads into one, and back into other owners."""
    model = without_unused(norm=False)
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ConfigError, match="consolidate_state_dict"):
        optimizer.state_dict()
    train(ShardedDataParallel(model, optimizer), optimizer, rank, 2)
    optimizer.consolidate_state_dict(-1)
    whole = optimizer.state_dict()
    plain_model = without_unused(norm=False)
    plain_model.load_state_dict(model.state_dict())
    plain = adamw(plain_model)
    plain.load_state_dict(copy.deepcopy(whole))  # torch keeps the tensors that it is given
    again_model = without_unused(norm=False)
    again_model.load_state_dict(model.state_dict())
    again = OSS(again_model.parameters(), torch.optim.AdamW, lr=0.5)
    again.load_state_dict(whole)
    again.consolidate_state_dict(0)
    images, labels = batch_of(7, 4)
    for one, step in ((plain_model, plain), (again_model, again)):
        F.cross_entropy(one(images), labels).backward()
        step.step()
    same = all(torch.equal(a, b) for a, b in zip(weights_of(plain_model).values(), weights_of(again_model).values()))
    return [same, again.param_groups[0]["lr"] == 1e-2]


def test_oss_state_moves_to_a_plain_optimizer_and_back() -> None:
    assert run_ranks(2, moved_state) == [[True, True], [True, True]]


def scheduled(rank: int) -> list[float]:
    model = nn.Linear(4, 4)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.3})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    schedule.base_lrs = [0.1, 0.3]
    return [group["lr"] for group in optimizer.optim.param_groups]


def test_oss_takes_schedulers_and_groups() -> None:
    assert run_ranks(2, scheduled)[0] == [0.1, 0.3]


def plant_no_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oss.OSS, "_broadcast", lambda self: None)


def plant_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "div_", lambda self, other: self)


@pytest.mark.parametrize("plant", [plant_no_broadcast, plant_sum])
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain_weights(torch.optim.SGD, 4)
    plant(monkeypatch)
    results = run_ranks(2, sharded_weights, 2, torch.optim.SGD, 1, 2**23)
    assert max(largest_difference(found, wanted) for found, _ in results) > 1e-4


def mistakes(rank: int) -> list[str]:
    """Lines of the FairScale article, and similar ones."""
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    said = []
    for call in (
        lambda: ShardedDataParallel(model, optimizer),
        lambda: ShardedDataParallel(model, torch.optim.AdamW),
        lambda: OSS(optimizer, local_rank=0),
        lambda: OSS(model.parameters(), optim=optimizer),
        lambda: OSS(model.parameters(), optim=torch.optim.AdamW, local_rank=0),
        lambda: OSS(model, optim=torch.optim.AdamW),
        lambda: ShardedDataParallel(model, OSS(nn.Linear(2, 2).parameters(), lr=0.1)),
        lambda: OSS(model.parameters(), optim=torch.optim.LBFGS, lr=0.1),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        said.append(str(error.value))
    return said


def test_mistakes_have_one_line_each() -> None:
    said = run_ranks(2, mistakes)[0]
    assert "AdamW is not an OSS; make one first" in said[0]
    assert "AdamW is not an OSS; make one first" in said[1]
    assert "the first argument is an optimizer (AdamW)" in said[2]
    assert "optim is an instance (AdamW); give the class" in said[3]
    assert "local_rank: neither AdamW nor OSS has this option" in said[4]
    assert "the first argument is a module (Linear)" in said[5]
    assert "no optimizer has weight, bias" in said[6]
    assert "optim is LBFGS, which recomputes the loss of all parameters within its step" in said[7]
    assert not any("\n" in line for line in said)


def test_without_a_process_group_there_is_one_line() -> None:
    model = nn.Linear(2, 2)
    for call in (lambda: OSS(model.parameters(), lr=0.1), lambda: DistributedDataParallel(model)):
        with pytest.raises(ConfigError, match="init_process_group"):
            call()

"""AdamW over flat buffers compared with torch's, and with the update that it replaces; its checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.engine.nonfinite import nonfinite_grads
from megatron.errors import ConfigError
from megatron.ops import Kernels, resolve
from megatron.ops.optim import adamw_in_place, join_fp32, split_fp32
from megatron.optimizer import GroupRule, Optimizer, megatron_rule
from megatron.optimizer.adam_flat import FlatAdam, Resident
from megatron.optimizer.norms import side_by_side, square_sum_for
from megatron.optimizer.update_rules import TorchUpdate
from tests.helpers.kernels import backend, kernel
from tests.helpers.runs import flags, make_parts, read_metrics
from tests.helpers.step_tensors import read_into

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [3, 50257, 1, 4096, 5]
STEPS = 6


@pytest.fixture
def kernels() -> Kernels:
    ops = backend("cpu").ops
    made = {name: kernel(name, ops) for name in ("adamw", "grad_norm")}
    return replace(resolve("ref", "cpu"), **made)


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 11)).to(
        dtype
    )


def make(model: nn.Module, kernels: Kernels | None, *, asynchronous: bool = False, **settings: Any) -> Optimizer:
    precision = {
        key: settings.pop(key) for key in ("fp16", "initial_loss_scale", "loss_scale_window") if key in settings
    }
    grads = BucketStore(model.named_parameters(), Axis.single("dp"), flat=kernels is not None)
    config, numbers = OptimizerConfig(**settings), PrecisionConfig(**precision)
    return Optimizer(grads, config, numbers, kernels=kernels, asynchronous=asynchronous)


def backward(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))
    optimizer.store.zero()
    (5 * nn.functional.cross_entropy(model(tokens).float(), tokens) * optimizer.loss_scale).backward()
    optimizer.store.reduce()


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> list[Any]:
    infos = []
    for step in steps:
        backward(model, optimizer, step)
        infos.append(optimizer.step(1e-2 / (1 + step), 0.1))
    return infos


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


class Bare:
    """The kernel on one flat buffer of parameters beside torch's AdamW on each of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self.weights = torch.randn(sum(SIZES)) * 0.02
        self.m, self.v = torch.zeros(2, sum(SIZES)).unbind()
        self.copy = torch.empty(sum(SIZES), dtype=BF16)
        self.ends, self.rates = torch.tensor(SIZES).cumsum(0), torch.tensor([[1.0, n % 2] for n in range(len(SIZES))])
        self.theirs = [nn.Parameter(part.to(dtype, copy=True)) for part in self.weights.split(SIZES)]
        groups = [{"params": [p], "weight_decay": 0.1 * (n % 2)} for n, p in enumerate(self.theirs)]
        self.rule = torch.optim.AdamW(groups, lr=1e-3, foreach=False, fused=False)

    def step(self, number: int, ops: Any) -> None:
        grad = torch.randn(sum(SIZES))
        corrections = [1 - 0.9**number, math.sqrt(1 - 0.999**number)]
        control = torch.tensor([1.0, 1.0, 1e-3, 0.1, *corrections])
        rest = grad, self.ends, self.rates, control, 0.9, 0.999, 1e-8
        ops.adamw_(self.weights, self.copy, self.m, self.v, *rest)
        for p, part in zip(self.theirs, grad.split(SIZES), strict=True):
            p.grad = part.to(p.dtype)
        self.rule.step()

    @property
    def flat(self) -> Tensor:
        return torch.cat([p.detach() for p in self.theirs])


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_against_torchs_adamw(dtype: torch.dtype) -> None:
    ops = backend("cpu").ops
    both = Bare(dtype)
    for number in range(1, 101):
        before = both.weights.clone()
        both.step(number, ops)
        if number == 1:
            # Beside a weight no larger than the step (1e-3), the step's own roundings would count.
            size = torch.maximum(torch.maximum(before.abs(), both.weights.abs()), torch.tensor(2e-3))
            ulp = torch.nextafter(size, torch.tensor(math.inf)) - size
            off = ((both.weights.double() - both.flat.double()).abs() / ulp).max()
            assert off <= (2 if dtype == torch.float64 else 4), "torch's fp32 update rounds a weight twice"
        assert torch.equal(both.copy, both.weights.to(BF16))
    # torch's own fp32 update is 1.6e-6 from its fp64 one by then: it rounds 1 - lr * weight_decay first.
    assert relative(both.weights, both.flat) < (1e-6 if dtype == torch.float64 else 3e-6)


@pytest.mark.parametrize("settings", [{}, {"clip_grad": 0.3, "adam_beta2": 0.95}, {"clip_grad": 0.0}])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_optimizer_takes_the_same_steps_as_with_torchs(
    kernels: Kernels, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    ours, theirs = make_model(dtype), make_model(dtype)
    flat, plain = make(ours, kernels, **settings), make(theirs, None, **settings)
    assert isinstance(flat._update, FlatAdam) and isinstance(plain._update, TorchUpdate)
    for mine, his in zip(train(ours, flat), train(theirs, plain), strict=True):
        assert mine.grad_norm == pytest.approx(his.grad_norm, rel=1e-5 if dtype == FP32 else 1e-2)
        assert mine.clipped == his.clipped
    for name, p in ours.named_parameters():
        gate = 1e-5 if dtype == FP32 else 1e-2
        assert relative(p.detach(), theirs.get_parameter(name).detach()) < gate, name
        if dtype == BF16:
            assert torch.equal(p, flat.state()[name]["master"].to(BF16))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_two_learning_rates(kernels: Kernels, dtype: torch.dtype) -> None:
    """The embedding has --decoupled-lr. Results equal torch's update, and torch's AdamW with groups of two rates."""

    def group(name: str, parameter: nn.Parameter) -> GroupRule:
        return replace(megatron_rule(name, parameter), decoupled=name == "0.weight")

    models = [make_model(dtype) for _ in range(3)]
    optimizers = []
    for model, one in zip(models[:2], (kernels, None), strict=True):
        grads = BucketStore(model.named_parameters(), Axis.single("dp"), flat=one is not None)
        optimizers.append(Optimizer(grads, OptimizerConfig(clip_grad=0.0), PrecisionConfig(), rule=group, kernels=one))
    named = {name: nn.Parameter(p.detach().float()) for name, p in models[2].named_parameters()}
    peer = torch.optim.AdamW([{"params": [p]} for p in named.values()], foreach=False)
    rates = [(1e-2, 3e-2), (0.0, 1e-2), (5e-3, 0.0)]
    for step, (lr, decoupled) in enumerate(rates):
        for model, optimizer in zip(models[:2], optimizers, strict=True):
            backward(model, optimizer, step)
            for name, _ in optimizer.store.grads():
                torch.manual_seed(step)
                optimizer.store.grad(name).copy_(torch.randn(optimizer.store.grad(name).shape))
            optimizer.step(lr, 0.1, decoupled_lr=decoupled)
        for part, (name, p) in zip(peer.param_groups, named.items(), strict=True):
            torch.manual_seed(step)
            p.grad = torch.randn(p.shape)
            part["lr"] = decoupled if name == "0.weight" else lr
            part["weight_decay"] = 0.1 if p.dim() > 1 else 0.0
        peer.step()
    for name, wanted in named.items():
        for model, optimizer in zip(models[:2], optimizers, strict=True):
            found = optimizer.state()[name].get("master", model.get_parameter(name).detach())
            assert relative(found, wanted.detach()) < 1e-6, name
    assert relative(models[0].get_parameter("0.weight").detach(), make_model(dtype).get_parameter("0.weight")) > 1e-2


def test_one_step_from_the_same_gradients(kernels: Kernels) -> None:
    """Only the first gradients of bf16 models are equal bit for bit."""
    ours, theirs = make_model(BF16), make_model(BF16)
    flat, plain = make(ours, kernels), make(theirs, None)
    train(ours, flat, range(1)), train(theirs, plain, range(1))
    for name in plain.state():
        assert relative(flat.state()[name]["master"], plain.state()[name]["master"]) < 3e-7, name


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_resume_is_bit_equal(kernels: Kernels, dtype: torch.dtype, remainders: bool, in_place: bool) -> None:
    """`in_place`: loads remainders although no full masters are in memory."""
    settings: dict[str, Any] = {"store_param_remainders": remainders}
    if dtype == FP16:
        settings |= {"fp16": True, "initial_loss_scale": 2.0**18}
    model = make_model(dtype)
    optimizer = make(model, kernels, **settings)
    train(model, optimizer)
    state, extra = copy.deepcopy(optimizer.state()), copy.deepcopy(optimizer.extra_state())
    weights = copy.deepcopy(model.state_dict())
    wanted = train(model, optimizer, range(STEPS, 2 * STEPS))
    resumed = make_model(dtype)
    again = make(resumed, kernels, **settings)
    resumed.load_state_dict(weights)
    kinds = 3 if dtype != FP32 and not (remainders and dtype == BF16) else 2
    assert not in_place or read_into(again, state) == kinds * len(state)
    again.load_state(state, extra)
    assert train(resumed, again, range(STEPS, 2 * STEPS)) == wanted
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    assert again.extra_state() == optimizer.extra_state()


def test_a_checkpoint_of_one_update_is_one_of_the_other(kernels: Kernels) -> None:
    """Names, shapes and dtypes are equal, so a run may change --kernels. Masters override the weights."""
    models = [make_model(BF16) for _ in range(3)]
    flat, plain = make(models[0], kernels), make(models[1], None)
    packed = make(models[2], kernels, store_param_remainders=True)
    train(models[0], flat)
    for other in (plain, packed):
        other.load_state(flat.state(), flat.extra_state())
        for name, kinds in flat.state().items():
            assert list(other.state()) == list(flat.state())
            for kind, tensor in kinds.items():
                assert torch.equal(other.state()[name][kind], tensor) and other.state()[name][kind].dtype == FP32
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_remainders_train_what_masters_do(kernels: Kernels) -> None:
    """Results are equal bit for bit as long as no weight lies halfway between two bf16 numbers."""
    models = [make_model(BF16), make_model(BF16)]
    optimizers = [make(models[0], kernels), make(models[1], kernels, store_param_remainders=True)]
    assert train(models[0], optimizers[0]) == train(models[1], optimizers[1])
    for name, kinds in optimizers[0].state().items():
        for kind, tensor in kinds.items():
            assert torch.equal(tensor, optimizers[1].state()[name][kind]), f"{name} {kind}"


def test_a_weight_and_its_remainder_are_the_master_exactly() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,)).to(torch.int32)
    ties = (torch.arange(-500, 500, dtype=torch.int32) << 16) | 0x8000
    masters = torch.cat([bits, ties]).view(FP32)
    masters = masters[masters.isfinite()]
    high, low = split_fp32(masters)
    assert torch.equal(join_fp32(high, low).view(torch.int32), masters.view(torch.int32))
    rounded = masters.to(BF16)
    other = high != rounded
    assert torch.equal(other, other & (low == -0x8000)), "other than torch rounds only where a number is halfway"
    assert other.any() and (high[other].abs() >= rounded[other].abs()).all()


def test_remainders_are_refused_where_nothing_can_keep_them() -> None:
    with pytest.raises(ConfigError, match="--store-param-remainders: needs the native AdamW"):
        make(make_model(BF16), None, store_param_remainders=True)


def test_remainders_in_a_run(kernels: Kernels, tmp_path: Path) -> None:
    """Losses are equal except for halfway weights, a resume is exact, and its checkpoint has masters."""

    def losses(**settings: Any) -> list[float]:
        path = tmp_path / "metrics.jsonl"
        path.unlink(missing_ok=True)
        with make_parts(flags(bf16=True, metrics_jsonl=path, **settings))[1] as parts:
            parts.trainer.fit()
        return [record["lm_loss"] for record in read_metrics(path)]

    plain, packed = losses(), losses(store_param_remainders=True)
    assert packed == pytest.approx(plain, rel=1e-4)
    assert losses(store_param_remainders=True, save=tmp_path, save_interval=3, exit_interval=3) == packed[:3]
    assert losses(store_param_remainders=True, load=tmp_path) == packed[3:]
    assert losses(load=tmp_path) == pytest.approx(plain[3:], rel=1e-4)


def test_remainders_need_bf16() -> None:
    with pytest.raises(ConfigError, match=r"--store-param-remainders: only bf16 weights.*add --bf16"):
        make_parts(flags(store_param_remainders=True))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_bad_gradient_moves_nothing(kernels: Kernels, dtype: torch.dtype, asynchronous: bool) -> None:
    model = make_model(dtype)
    optimizer = make(model, kernels, asynchronous=asynchronous)
    train(model, optimizer, range(2))
    before = copy.deepcopy((optimizer.state(), model.state_dict()))
    backward(model, optimizer, 2)
    optimizer.store.grad("1.weight")[3, 4] = math.nan
    info = optimizer.step(1e-2, 0.1)
    assert info.skipped and nonfinite_grads(optimizer.store) == ["1.weight"] and optimizer.extra_state()["step"] == 2
    for name, kinds in before[0].items():
        assert all(torch.equal(tensor, optimizer.state()[name][kind]) for kind, tensor in kinds.items())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before[1].items())


def test_parameters_of_several_types_share_a_bucket(kernels: Kernels) -> None:
    """The fp32 parts of a bf16 model have no masters; each run of one dtype is a separate launch."""
    ours, theirs = make_model(BF16), make_model(BF16)
    for model in (ours, theirs):
        model[3].float()
        model[3].register_forward_pre_hook(lambda module, args: (args[0].float(),))
        model[3].register_forward_hook(lambda module, args, out: out.to(BF16))
    flat, plain = make(ours, kernels), make(theirs, None)
    train(ours, flat, range(1)), train(theirs, plain, range(1))
    assert {name: set(kinds) for name, kinds in flat.state().items()} == {
        name: set(kinds) for name, kinds in plain.state().items()
    }
    for name, p in ours.named_parameters():
        assert relative(p.detach(), theirs.get_parameter(name).detach()) < 1e-3, name


def test_neighbours_become_one_and_the_sum_is_right(kernels: Kernels) -> None:
    buffer = torch.randn(1000)
    parts = [*buffer.split([100, 0, 300, 600])]
    assert [flat.data_ptr() for flat in side_by_side(parts[::-1])] == [buffer.data_ptr()]
    assert sorted(flat.numel() for flat in side_by_side([parts[0], parts[3], torch.randn(7)])) == [7, 100, 600]
    mixed = [*parts, torch.randn(30, 20).t(), torch.randn(5, dtype=torch.float64), torch.randn(9).to(BF16)]
    wanted = sum(part.double().square().sum().item() for part in mixed)
    assert kernels.grad_norm is not None
    total = square_sum_for(kernels, asynchronous=False)
    assert total(mixed).item() == pytest.approx(wanted, rel=1e-13)
    assert total([]).item() == 0.0 and total([torch.zeros(0)]).item() == 0.0


def test_addresses_do_not_decide_the_order_of_a_sum() -> None:
    """Two equal runs have their buffers at different addresses, but log the same last bits."""
    first, second, third = buffers = [torch.empty(1 << 16) for _ in range(3)]
    for order in ((third, first, second), (second, third, first), (first, second, third)):
        for flat, buffer in zip(side_by_side(order), order, strict=True):
            assert flat.data_ptr() == buffer.data_ptr()
    assert len({buffer.data_ptr() for buffer in buffers}) == 3


@pytest.fixture(params=["no correction", "decay everywhere", "a stale copy", "the factor is left out"])
def plant(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """An AdamW kernel with a mistake."""
    ops = backend("cpu").ops

    def wrong(weights: Tensor, beside: Tensor, *rest: Any) -> None:
        m, v, grad, ends, rates, control, *numbers = rest
        control, rates = control.clone(), rates.clone()
        if request.param == "no correction":
            control[4:] = 1.0
        elif request.param == "decay everywhere":
            rates[:] = 1.0
        elif request.param == "the factor is left out":
            control[1] = 1.0
        beside = beside.clone() if request.param == "a stale copy" else beside
        ops.adamw_(weights, beside, m, v, grad, ends, rates, control, *numbers)

    yield wrong


def test_planted_bugs_are_seen(kernels: Kernels, plant: Callable[..., None]) -> None:
    ours, theirs = make_model(BF16), make_model(BF16)
    train(ours, make(ours, replace(kernels, adamw=plant), clip_grad=0.1), range(2))
    train(theirs, make(theirs, None, clip_grad=0.1), range(2))
    off = max(relative(p.detach(), theirs.get_parameter(name).detach()) for name, p in ours.named_parameters())
    assert off > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_in_another_order_in_memory_is_that_of_the_tensor(dtype: torch.dtype) -> None:
    """The flat tensor has a channels_last weight in memory order; other rules get its state by its shape."""

    def make(flat: bool) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 2).to(dtype).to(memory_format=torch.channels_last)
        store = BucketStore(model.named_parameters(), Axis.single("dp"), flat=flat)
        optimizer = Optimizer(store, OptimizerConfig(), PrecisionConfig(bf16=dtype == torch.bfloat16))
        if flat:
            rules = {name: megatron_rule(name, store.parameter(name)) for name in store.names}
            update = FlatAdam(store, rules, (0.9, 0.999), 1e-8, adamw_in_place, [Resident(store.runs())])
            optimizer._update = update
        return model, optimizer

    (one, flat), (other, by_tensor) = make(True), make(False)
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for model, optimizer in ((one, flat), (other, by_tensor)):
        optimizer.store.zero()
        model(x).float().square().mean().backward()
        optimizer.store.reduce()
        optimizer.step(0.01, 0.0)
    state = flat.state()["weight"]
    moments = by_tensor.state()["weight"]
    assert torch.allclose(state["exp_avg"], moments["exp_avg"], atol=1e-8)
    assert torch.equal(state.get("master", one.weight.detach()).to(dtype), one.weight)
    by_tensor.load_state(flat.state(), flat.extra_state())
    if dtype == torch.bfloat16:
        assert torch.equal(one.weight, other.weight)
    moments["exp_avg"].add_(1.0)
    flat.load_state(by_tensor.state(), by_tensor.extra_state())
    assert torch.equal(flat.state()["weight"]["exp_avg"], by_tensor.state()["weight"]["exp_avg"])

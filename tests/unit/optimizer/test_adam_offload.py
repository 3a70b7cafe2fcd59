"""AdamW with its state on the host or in a file: the same update, with every copy at its time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.ops.optim import adamw_in_place
from megatron.optimizer import GroupRule, Optimizer, megatron_rule
from megatron.optimizer import build_update as module
from megatron.optimizer.adam_flat import FlatAdam, Resident
from megatron.optimizer.adam_offload import Offloaded
from megatron.optimizer.build_update import build_offloaded
from megatron.training import devices
from megatron.training.settings import read_settings
from megatron.utils.log import RankLog
from tests.helpers.kernels import backend, kernel
from tests.helpers.runs import flags, same_numbers, train_here

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BETAS, EPS = (0.9, 0.95), 1e-8
STEPS = 4


class FarLink:
    """A device with its own memory: copies happen when they are waited for, or when the device continues."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._back: list[tuple[Tensor, Tensor]] = []
        self._numbers: dict[int, int] = {}

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.full((length,), torch.nan, dtype=dtype)

    def _number(self, tensor: Tensor) -> int:
        return self._numbers.setdefault(tensor.data_ptr(), len(self._numbers))

    def to_host(self, source: Tensor, into: Tensor) -> Callable[[], None]:
        number = self._number(into)
        self.events.append(f"start {number}")
        into.fill_(torch.nan)

        def wait() -> None:
            self.events.append(f"wait {number}")
            into.copy_(source)

        return wait

    def to_device(self, source: Tensor, into: Tensor) -> None:
        self.events.append("back")
        self._back.append((source, into))

    def join(self) -> None:
        self.events.append("join")
        for source, into in self._back:
            into.copy_(source)
        self._back.clear()


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 11)).to(
        dtype
    )


Make = Callable[[BucketStore, OptimizerConfig, dict[str, Any]], Any]


def make(
    model: nn.Module, update: Make | None, rule: Callable[..., GroupRule] = megatron_rule, **settings: Any
) -> Optimizer:
    """Makes an optimizer with this update instead of its own."""
    grads = BucketStore(model.named_parameters(), Axis.single("dp"), flat=True, bucket_size=100)
    config = OptimizerConfig(adam_beta2=BETAS[1], weight_decay=0.1, **settings)
    fp16 = next(model.parameters()).dtype == torch.float16
    with pytest.MonkeyPatch.context() as patch:
        if update is not None:
            patch.setattr("megatron.optimizer.optimizer.build_update", lambda g, c, rules, *_: update(g, c, rules))
        precision = PrecisionConfig(fp16=fp16, initial_loss_scale=2.0**20, hysteresis=1)
        return Optimizer(grads, config, precision, rule=rule)


def train(model: nn.Module, optimizer: Optimizer, steps: Sequence[int] = range(STEPS)) -> list[float]:
    norms = []
    for step in steps:
        tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))
        optimizer.store.zero()
        logits = model(tokens)
        (logits.double().square().mean() * optimizer.loss_scale).backward()
        optimizer.store.reduce()
        norms.append(optimizer.step(1e-2, 0.1).grad_norm)
    return norms


def twin(grads: BucketStore, config: OptimizerConfig, rules: Any) -> FlatAdam:
    return FlatAdam(grads, rules, BETAS, EPS, adamw_in_place, [Resident(grads.runs())])


def near(directory: Path | None) -> Make:
    return lambda grads, config, rules: FlatAdam(
        grads, rules, BETAS, EPS, adamw_in_place, [Offloaded(grads, grads.runs(), directory=directory)]
    )


def far(link: FarLink, directory: Path | None) -> Make:
    return lambda grads, config, rules: FlatAdam(
        grads, rules, BETAS, EPS, adamw_in_place, [Offloaded(grads, grads.runs(), directory=directory, link=link)]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("other_memory", [False, True])
def test_the_update_is_the_same_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, on_disk: bool, other_memory: bool
) -> None:
    plain, moved = make_model(dtype), make_model(dtype)
    directory = tmp_path if on_disk else None
    expected = make(plain, twin)
    offloaded = make(moved, far(FarLink(), directory) if other_memory else near(directory))
    assert str(train(plain, expected)) == str(train(moved, offloaded))  # norms that are not finite, too
    for (name, a), b in zip(plain.named_parameters(), moved.parameters(), strict=True):
        assert torch.equal(a, b), name
    state = offloaded.state()
    assert list(state) == list(expected.state())
    for name, kinds in expected.state().items():
        assert state[name].keys() == kinds.keys()
        for kind, tensor in kinds.items():
            assert torch.equal(state[name][kind], tensor), (name, kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_is_torchs_update(dtype: torch.dtype) -> None:
    """The match is exact in fp64, and within rounding below it."""
    plain, ours = make_model(dtype), make_model(dtype)
    train(plain, make(plain, None))
    train(ours, make(ours, twin))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_rates_are_as_precise_as_the_weights() -> None:
    """Groups have their own factors, and one has the decoupled learning rate; fp32 can represent none of them."""
    models = plain, ours = make_model(torch.float64), make_model(torch.float64)
    for model, update in ((plain, None), (ours, twin)):
        optimizer = make(model, update, rule=lambda name, _: GroupRule(0.7, 0.3, decoupled=name.startswith("1.")))
        for seed in range(STEPS):
            optimizer.store.zero()
            model(torch.randint(11, (6,), generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.store.reduce()
            optimizer.step(1e-2, 0.1, decoupled_lr=3e-3)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_kernel_updates_on_the_host(tmp_path: Path, dtype: torch.dtype) -> None:
    native = kernel("adamw", backend("cpu").ops)
    plain, moved = make_model(dtype), make_model(dtype)
    train(
        plain,
        make(plain, lambda grads, config, rules: FlatAdam(grads, rules, BETAS, EPS, native, [Resident(grads.runs())])),
    )
    link = FarLink()
    train(
        moved,
        make(
            moved,
            lambda grads, config, rules: FlatAdam(
                grads, rules, BETAS, EPS, native, [Offloaded(grads, grads.runs(), directory=tmp_path, link=link)]
            ),
        ),
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))


def test_every_copy_has_its_time() -> None:
    """All gradient copies start before the first is waited for. Weights return buffer by buffer, and the device
    continues after the last."""
    model, link = make_model(torch.bfloat16), FarLink()
    optimizer = make(model, far(link, None))
    train(model, optimizer, [0])
    buffers = len(list(optimizer.store.runs()))
    assert buffers > 2
    starts = [event for event in link.events if event.startswith("start")]
    assert link.events[:buffers] == starts and len(starts) == buffers
    assert link.events[buffers:] == [
        *(event for start in starts for event in (start.replace("start", "wait"), "back")),
        "join",
    ]


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        model = make_model(torch.float16)
        optimizer = make(model, far(FarLink(), directory))
        optimizer.scaler.scale = 2.0**10
        train(model, optimizer, [0])
        assert optimizer.skipped_in_a_row == 0
        before = copy.deepcopy((dict(model.named_parameters()), optimizer.state()))
        optimizer.scaler.scale = 2.0**80  # the gradients overflow
        train(model, optimizer, [1])
        assert optimizer.skipped_in_a_row == 1
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[0][name])
            assert all(torch.equal(tensor, before[1][name][kind]) for kind, tensor in optimizer.state()[name].items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_resumed_run_is_the_same(tmp_path: Path, dtype: torch.dtype, on_disk: bool) -> None:
    """The other run may be without offloading: the state has the same names."""
    directory = tmp_path if on_disk else None
    whole = make_model(dtype)
    train(whole, make(whole, far(FarLink(), directory)))
    for first_update in (twin, far(FarLink(), directory)):
        first, second = make_model(dtype), make_model(dtype)
        before = make(first, first_update)
        train(first, before, range(2))
        after = make(second, far(FarLink(), directory))
        second.load_state_dict(first.state_dict())
        assert not any(after.loadable_in_place().values()), "no file is read into what it keeps"
        after.load_state(copy.deepcopy(before.state()), before.extra_state())
        train(second, after, range(2, STEPS))
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_weights_that_were_loaded_without_state_are_the_masters(tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        model, other = make_model(torch.bfloat16), make_model(torch.bfloat16)
        optimizer = make(model, far(FarLink(), directory))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
            for parameter in other.parameters():
                parameter.mul_(1.5)
        optimizer.refresh_masters()
        train(model, optimizer)
        train(other, make(other, twin))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_a_share_is_offloaded(monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    links: list[FarLink] = []
    monkeypatch.setattr(module, "HostLink", lambda device: links.append(FarLink()) or links[-1])
    plain, moved = make_model(torch.bfloat16), make_model(torch.bfloat16)
    expected = make(plain, twin)
    train(plain, expected)
    optimizer = make(
        moved,
        lambda grads, config, rules: build_offloaded(grads, config, rules, None, torch.device("cuda")),
        optimizer_offload_fraction=fraction,
    )
    train(moved, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))
    assert list(optimizer.state()) == list(expected.state())
    buffers = list(optimizer.store.runs())
    started = len([event for event in links[0].events if event.startswith("start")]) // STEPS
    share = sum(flat.weights.numel() for flat in buffers[:started]) / sum(flat.weights.numel() for flat in buffers)
    assert abs(share - fraction) < 0.3 and (share == fraction or 0 < fraction < 1)


def test_a_run_with_its_state_in_a_file_is_the_same_run(tmp_path: Path) -> None:
    """A checkpoint of either kind resumes with the other."""
    place = {"optimizer_offload_directory": tmp_path / "scratch"}
    kinds: tuple[dict[str, Any], ...] = ({}, place)
    whole = train_here(flags(bf16=True, optimizer="adam"))
    for first, then in product(kinds, kinds):
        save = tmp_path / f"{len(first)}{len(then)}"
        train_here(flags(bf16=True, optimizer="adam", save=save, exit_interval=3, **first))
        resumed = train_here(flags(bf16=True, optimizer="adam", load=save, **then))
        assert same_run(whole, resumed)
    assert same_run(whole, train_here(flags(bf16=True, optimizer="adam", **place)))
    assert list((tmp_path / "scratch").iterdir()) == []


def same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    last = same_numbers(one["records"][-1]) == same_numbers(other["records"][-1])
    return last and all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())


def test_on_a_cpu_host_memory_is_said_to_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    result = train_here(flags(optimizer="adam", optimizer_cpu_offload=True, train_iters=1))
    assert result["reason"].kind == "done"
    config = read_settings(flags(optimizer="adam", optimizer_cpu_offload=True))
    devices.prepare_accelerator(config, torch.device("cpu"), RankLog(0))
    assert "--optimizer-cpu-offload: has no effect, because this device uses host memory" in capsys.readouterr().out

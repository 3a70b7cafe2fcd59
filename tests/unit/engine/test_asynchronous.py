"""Steps whose outcome is read later: the run is the same, and issuing a step reads no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.engine import Engine
from megatron.engine import assembly as build_module
from megatron.errors import DataError, NonFiniteError
from megatron.optimizer import DynamicLossScaler
from megatron.optimizer import loss_scaler as scaler_module
from megatron.optimizer.loss_scaler import ScaleOnDevice
from megatron.training.hooks import Hook
from megatron.training.trainer import Trainer
from tests.helpers.kernels import backend
from tests.helpers.runs import flags, make_parts, read_metrics, same_numbers

FP16 = {"fp16": True, "initial_loss_scale": 2.0**21, "loss_scale_window": 3, "hysteresis": 2}
# Without csrc, a norm that may not be read on the host is summed in another precision.
REF = {"kernels": "ref", "clip_grad": 0.0}
MOE = {
    "disable_bias_linear": True,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
}


class NoReading(TorchDispatchMode):
    """Fails where a number is read from a tensor, because on an accelerator the host would wait there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"), name
        return func(*args, **(kwargs or {}))


@contextmanager
def asynchronous() -> Iterator[None]:
    """Builds runs on this CPU as for an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "runs_ahead", lambda device: True)
        yield


def watch(engine: Engine) -> list[int]:
    """Issues every step under NoReading; settling the previous step is excluded."""
    step, settle, seen, modes = engine.train_step, engine._settle_step, list[int](), list[NoReading]()

    def watched(micro_batches: Any, **settings: Any) -> None:
        with NoReading() as mode:
            modes.append(mode)
            step(micro_batches, **settings)
            modes.clear()
        seen.append(1)

    def outside() -> None:
        for mode in modes:
            mode.__exit__(None, None, None)
        settle()
        for mode in modes:
            mode.__enter__()

    engine.train_step, engine._settle_step = watched, outside  # type: ignore[method-assign]
    return seen


def run(
    argv: list[str], *, ahead: bool, watched: bool = False
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Any]:
    path = Path(argv[argv.index("--metrics-jsonl") + 1])
    if ahead:
        with asynchronous():
            _, parts = make_parts(argv)
    else:
        _, parts = make_parts(argv)
    with parts:
        assert parts.trainer.engine.asynchronous == ahead
        seen = watch(parts.trainer.engine) if watched else []
        parts.trainer.fit()
        assert len(seen) == (parts.progress.iteration if watched else 0)
    records = [same_numbers(record) for record in read_metrics(path)]
    weights = {name: p.detach().clone() for name, p in parts.engine.model.named_parameters()}
    return records, weights, (parts.progress, parts.trainer.engine.optimizer.extra_state())


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16, overflows": FP16,
    "fp16, torch's update": {**FP16, **REF},
    "fp32, sgd": {"optimizer": "sgd", "lr": 0.1, **REF},
    "experts": MOE,
    "counted zeros, warm-up": {"log_num_zeros_in_grad": True, "lr_warmup_iters": 4, **FP16},
    "saved, evaluated": {"eval_iters": 1, "eval_interval": 3, "save_interval": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_ahead_is_the_same_run(tmp_path: Path, name: str) -> None:
    """Losses, norms, scales, rates, counters and weights, bit for bit; a skipped step does not move schedules."""
    backend("cpu")
    found = []
    for ahead in (False, True):
        settings = {"train_iters": 12, "metrics_jsonl": tmp_path / f"{ahead}.jsonl", **CASES[name]}
        if "save_interval" in settings:
            settings["save"] = tmp_path / str(ahead)
        found.append(run(flags(**settings), ahead=ahead))
    (records, weights, counters), (expected, expected_weights, expected_counters) = found
    if "kernels" in CASES[name]:
        for one, other in zip(records, expected, strict=True):
            assert float(one.pop("grad_norm")) == pytest.approx(float(other.pop("grad_norm")), rel=1e-6, nan_ok=True)
    assert records == expected and len(records) >= 12
    assert counters == expected_counters
    assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())
    if "fp16" in CASES[name]:
        assert any(r["skipped_iterations"] != "0" for r in records), "some steps are to overflow"
        assert len({r["loss_scale"] for r in records}) > 2


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16, overflows", "fp16, torch's update", "counted zeros, warm-up"])
def test_no_number_is_read_while_a_step_is_handed_over(tmp_path: Path, name: str) -> None:
    backend("cpu")
    settings = {"train_iters": 5, "metrics_jsonl": tmp_path / "metrics.jsonl", **CASES[name]}
    run(flags(**settings), ahead=True, watched=True)


def test_the_watch_sees_a_number_that_is_read(tmp_path: Path) -> None:
    """A synchronous engine reads its decision, which the watch finds."""
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        run(flags(kernels="ref", metrics_jsonl=tmp_path / "m.jsonl"), ahead=False, watched=True)


def test_the_scale_on_the_device_is_the_scaler() -> None:
    generator = torch.Generator().manual_seed(3)
    for hysteresis, window, consecutive in product((1, 2, 3), (2, 3, 5), (False, True)):
        scaler = DynamicLossScaler(64.0, 2.0, window, hysteresis, consecutive)
        device = ScaleOnDevice(replace(scaler), torch.device("cpu"))
        for overflow in (torch.rand(400, generator=generator) < 0.4).tolist():
            scaler.update(overflow)
            device.update(torch.tensor(overflow))
            assert device.scale.item() == scaler.scale


def plant_no_hysteresis(patch: pytest.MonkeyPatch) -> None:
    update = ScaleOnDevice.update

    def wrong(self: ScaleOnDevice, overflow: torch.Tensor) -> None:
        self._hysteresis.fill_(1)
        update(self, overflow)

    patch.setattr(scaler_module.ScaleOnDevice, "update", wrong)


def plant_stale_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scaler_module.ScaleOnDevice, "update", lambda self, overflow: None)


@pytest.mark.parametrize("plant", [plant_no_hysteresis, plant_stale_scale])
def test_planted_bugs_in_the_scale_are_seen(tmp_path: Path, plant: Any) -> None:
    settings = {"train_iters": 12, **FP16}
    right = run(flags(metrics_jsonl=tmp_path / "right.jsonl", **settings), ahead=False)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        wrong = run(flags(metrics_jsonl=tmp_path / "wrong.jsonl", **settings), ahead=True)
    assert any(not torch.equal(right[1][name], wrong[1][name]) for name in right[1])


def poison(parts: Any, at: int, value: float) -> None:
    """Replaces the loss of iteration `at` by `value`."""
    engine, forward = parts.engine, parts.engine.passes.forward_step
    calls = iter(range(1000))

    def wrong(model: Any, batch: Any) -> Any:
        total, count = forward(model, batch)
        return (total * value, count * (value != 0)) if next(calls) // 4 + 1 == at else (total, count)

    engine.passes.forward_step = wrong


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [(float("nan"), NonFiniteError, "iteration 3: the loss is nan"), (0.0, DataError, "mask")],
)
def test_a_bad_step_ends_the_run_before_the_next_update(value: float, error: type, words: str) -> None:
    with asynchronous():
        _, parts = make_parts(flags())
    weights: list[list[torch.Tensor]] = []
    settle = parts.trainer.engine._settle_step

    def noted() -> None:
        weights.append([p.detach().clone() for p in parts.engine.model.parameters()])
        settle()

    parts.trainer.engine._settle_step = noted  # type: ignore[method-assign]
    poison(parts, at=3, value=value)
    with pytest.raises(error, match=words), parts:
        parts.trainer.fit()
    assert parts.progress.iteration == 4 and len(weights) == 4
    assert all(torch.equal(a, b) for a, b in zip(weights[2], weights[3], strict=True)), "iteration 3 was not applied"


def test_the_gradients_of_the_bad_step_are_looked_at() -> None:
    """Buffers already hold the good gradients of the next step when the outcome is known."""
    with asynchronous():
        _, parts = make_parts(flags())
    engine, bad = parts.engine, 9  # of a global batch of the third iteration
    forward, model = engine.passes.forward_step, engine.model
    seen: list[int] = []

    def wrong(model: Any, batch: Any) -> Any:
        total, count = forward(model, batch)
        ids = batch["sample_ids"].tolist()
        seen.extend(ids)
        return (total + model.final_layernorm.weight.sum() * (float("nan") if bad in ids else 0.0), count)

    engine.passes.forward_step = wrong
    with pytest.raises(NonFiniteError, match=r"first non-finite gradients: final_layernorm\.weight"), parts:
        parts.trainer.fit()
    assert seen.count(bad) == 2 and all(torch.isfinite(p).all() for p in model.parameters())


def test_iterations_one_by_one_are_settled() -> None:
    """tools/check_layout.py runs iterations like this, also on a GPU."""
    with asynchronous():
        _, parts = make_parts(flags())
    with parts:
        one, more = parts.trainer.iterate(), parts.trainer.iterate(3)
    assert one is not None and more is not None and parts.progress.iteration == 4
    assert parts.progress.schedule_samples == parts.progress.consumed_train_samples


READERS: dict[str, Callable[[Any], int]] = {
    "progress": lambda parts: parts.trainer.progress.schedule_samples // 8,
    "optimizer": lambda parts: parts.engine.optimizer.extra_state()["step"],
    "evaluation": lambda parts: (parts.evaluator.valid(parts.progress, "here"), parts.progress.schedule_samples // 8)[
        1
    ],
}


class Reads(Hook):
    """Reads the state of the run while a step is in flight."""

    parts: Any

    def __init__(self, reader: Callable[[Any], int]) -> None:
        self.reader, self.seen = reader, list[int]()

    def after_iteration(self, iteration: int) -> None:
        assert self.parts.trainer.engine._in_flight is not None
        self.seen.append(self.reader(self.parts))
        assert self.parts.trainer.engine._in_flight is None


def read_between_steps(reader: str) -> list[int]:
    hook = Reads(READERS[reader])
    with asynchronous():
        _, hook.parts = make_parts(flags(train_iters=3, eval_iters=1, eval_interval=100), hooks=[hook])
    with hook.parts as parts:
        parts.trainer.fit()
    return hook.seen


@pytest.mark.parametrize("reader", READERS)
def test_whatever_is_read_between_steps_is_settled(reader: str) -> None:
    """A reader settles the step in flight automatically."""
    assert read_between_steps(reader) == [1, 2, 3]


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_that_does_not_settle_is_seen(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "progress", property(lambda self: self._progress))
    monkeypatch.setattr(Engine, "optimizer", property(lambda self: self._optimizer))
    monkeypatch.setattr(Engine, "evaluate", lambda self, *given: self.evaluation.evaluate(*given))
    with pytest.raises(AssertionError):
        read_between_steps(reader)


@pytest.mark.parametrize(("ahead", "steps"), [(False, 1), (True, 2)])
def test_a_reason_to_stop_is_read_like_the_outcome_of_a_step(ahead: bool, steps: int) -> None:
    """Synchronous runs read it at once, asynchronous ones when the next step has been issued."""
    with asynchronous() if ahead else nullcontext():
        _, parts = make_parts(flags(exit_duration_in_mins=1e-9))
    with parts:
        reason = parts.trainer.fit()
    assert (reason.kind, parts.progress.iteration) == ("exit_duration", steps)

"""Each rule beside torch's optimizer of that name, or a numpy float64 twin; and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.optimizer import GroupRule, Matrix
from megatron.optimizer.rules import Slot, UpdateRule, adam, lion
from megatron.optimizer.rules.base import WHOLE_KINDS
from megatron.optimizer.rules.choose import choose_rules
from megatron.state.shard import Shard
from tests.helpers.update_rule import update

CPU = torch.device("cpu")
STEPS = [(1e-2 / (1 + i), 0.1 + 0.02 * i) for i in range(12)]  # (lr, weight decay)
SHAPE = (7, 300)


def grads_of(number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return (noise * torch.linspace(0.01, 1.0, SHAPE[1], dtype=torch.float64)).to(dtype)


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return grads_of(1000, dtype)


def rule_of(weight: Tensor, **settings: object) -> UpdateRule:
    """Rule of a model with one matrix."""
    parameter = torch.nn.Parameter(weight)
    grads = BucketStore([("w", parameter)], Axis.single("dp"))
    spec, single = Shard("w", tuple(weight.shape)), Axis.single("x")
    groups = {"w": GroupRule(matrix=Matrix(spec, single, single, weight.shape[1]))}
    return choose_rules(grads, OptimizerConfig(**settings), groups, {"w": spec}, CPU)["w"]  # type: ignore[arg-type]


def run(rule: UpdateRule, slot: Slot, steps: range = range(len(STEPS))) -> None:
    for step in steps:
        update(rule, [slot], [grads_of(step, slot.tensor.dtype)], *STEPS[step])


def difference(ours: Tensor, theirs: Tensor | np.ndarray) -> float:
    wanted = torch.as_tensor(theirs).double()
    return float((ours.double() - wanted).norm() / wanted.norm())


# twins in numpy


def lion_twin(beta1: float, beta2: float) -> np.ndarray:
    weight, momentum = start().numpy().copy(), np.zeros(SHAPE)
    for step, (lr, decay) in enumerate(STEPS):
        grad = grads_of(step).numpy()
        weight -= lr * (np.sign(beta1 * momentum + (1 - beta1) * grad) + decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * grad
    return weight


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds to nearest, ties to even, in integers."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def adam_twin(round_m: Callable[[np.ndarray], np.ndarray], round_v: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    weight, m, v = start().numpy().copy(), np.zeros(SHAPE), np.zeros(SHAPE)
    for step, (lr, decay) in enumerate(STEPS, 1):
        grad = grads_of(step - 1).numpy()
        weight *= 1 - lr * decay
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        weight -= lr * (m / (1 - 0.9**step)) / (np.sqrt(v) / math.sqrt(1 - 0.95**step) + 1e-8)
        m, v = round_m(m), round_v(v)
    return weight


def exact(values: np.ndarray) -> np.ndarray:
    return values


def test_lion() -> None:
    weight = start()
    rule = rule_of(weight, optimizer="lion", lion_beta1=0.9, lion_beta2=0.97)
    run(rule, rule.slot("w", weight))
    assert difference(weight, lion_twin(0.9, 0.97)) < 1e-13


def test_adam_with_l2_decay_is_torchs() -> None:
    weight, theirs = start(), torch.nn.Parameter(start())
    rule = rule_of(weight, decoupled_weight_decay=False, adam_beta2=0.95)
    run(rule, rule.slot("w", weight))
    peer = torch.optim.Adam([theirs], betas=(0.9, 0.95), foreach=False)
    for step, (lr, decay) in enumerate(STEPS):
        theirs.grad = grads_of(step)
        peer.param_groups[0].update(lr=lr, weight_decay=decay)
        peer.step()
    assert difference(weight, theirs.detach()) < 1e-14


@pytest.mark.parametrize("narrow", ["exp_avg", "exp_avg_sq", "both"])
def test_moments_in_bf16(narrow: str) -> None:
    types = {f"{kind}_dtype": "bf16" for kind in ("exp_avg", "exp_avg_sq") if narrow in (kind, "both")}
    weight = start()
    rule = rule_of(weight, use_precision_aware_optimizer=True, adam_beta2=0.95, **types)
    slot = rule.slot("w", weight)
    run(rule, slot)
    assert all(slot.state[name.removesuffix("_dtype")].dtype == torch.bfloat16 for name in types)
    rounded = [to_bf16 if f"{kind}_dtype" in types else exact for kind in ("exp_avg", "exp_avg_sq")]
    assert difference(weight, adam_twin(*rounded)) < 1e-12
    assert difference(weight, adam_twin(exact, exact)) > 1e-6, "the rounding must be seen to prove anything"


def test_moments_in_fp32_leave_torchs_rule() -> None:
    assert type(rule_of(start(), use_precision_aware_optimizer=True)).__name__ == "Adam"


RULES: dict[str, dict[str, object]] = {
    "adam": {},
    "adam, l2": {"decoupled_weight_decay": False},
    "sgd": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion"},
    "adam8bit": {"optimizer": "adam8bit"},
    "bf16 moments": {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "muon": {"optimizer": "muon"},
    "adafactor": {"optimizer": "adafactor", "adafactor_beta1": 0.9},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_a_step_that_is_left_out_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """The device decides. A skipped step may have any gradient; other steps equal those without the decision."""
    weight, plain = start(dtype), start(dtype)
    rule = rule_of(weight, **RULES[name])
    if not rule.fused:
        pytest.fail("torch has lost the fused kernel of this rule on CPUs")
    slot, other = rule.slot("w", weight), rule.slot("w", plain)
    for step in range(6):
        if step in (0, 3):
            before = [weight.clone(), *(kind.clone() for kind in slot.state.values()), slot.step.clone()]
            update(rule, [slot], [torch.full(SHAPE, math.nan, dtype=dtype)], *STEPS[step], torch.tensor(1.0))
            after = [weight, *slot.state.values(), slot.step]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), step
        update(rule, [slot], [grads_of(step, dtype)], *STEPS[step], torch.tensor(0.0))
        update(rule, [other], [grads_of(step, dtype)], *STEPS[step])
    assert difference(weight, plain) < 1e-6 and all(
        difference(slot.state[kind].float(), other.state[kind].float()) < 1e-5 for kind in slot.state
    )


@pytest.mark.parametrize("name", RULES)
def test_state_is_saved_and_restored_bit_for_bit(name: str) -> None:
    weight = start(torch.float32)
    rule = rule_of(weight, **RULES[name])
    slot = rule.slot("w", weight)
    run(rule, slot, range(5))
    resumed = weight.clone()
    again = rule.slot("w", resumed)
    saved = rule.saved(slot)
    cut = [tensor for kind, tensor in saved.items() if kind not in WHOLE_KINDS]
    assert all(tensor.shape == weight.shape for tensor in cut), "layouts are cut by the shape of the weight"
    rule.restore(again, saved)
    again.step.fill_(slot.step if name != "muon" else 5)
    run(rule, slot, range(5, 12)), run(rule, again, range(5, 12))
    assert torch.equal(weight, resumed)
    assert all(torch.equal(slot.state[kind], again.state[kind]) for kind in slot.state)


def test_planted_bug_lions_betas_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lion.Lion, "step", exchanged(lion.Lion.step))
    with pytest.raises(AssertionError):
        test_lion()


def exchanged(update: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *rest: update(lion.Lion(self.beta2, self.beta1), *rest)


def test_planted_bug_moments_that_are_never_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    made = adam.Narrow.made
    wide = lambda self, name, tensor: {k: v.double() for k, v in made(self, name, tensor).items()}  # noqa: E731
    monkeypatch.setattr(adam.Narrow, "made", wide)
    with pytest.raises(AssertionError):
        test_moments_in_bf16("both")

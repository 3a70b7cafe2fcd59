"""Steps compared with torch's own optimizers and clipping, exact resume, and the handling of bad numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.adam import adam

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.engine.nonfinite import nonfinite_grads
from megatron.errors import CheckpointError
from megatron.optimizer import GroupRule, Optimizer, update_rules
from megatron.optimizer import optimizer as module
from megatron.optimizer.rules import adam as rule_of_adam
from tests.helpers.runs import flags, make_parts
from tests.helpers.step_tensors import read_into

HALF = (torch.bfloat16, torch.float16)
STEPS = [(1e-2 / (1 + i), 0.1 + 0.01 * i) for i in range(8)]  # (lr, weight decay), both moving


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 11))
    return model.to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))
    logits = model(tokens)
    return 5 * nn.functional.cross_entropy(logits.float() if logits.dtype in HALF else logits, tokens)


def make(model: nn.Module, config: OptimizerConfig | None = None, **precision: Any) -> Optimizer:
    grads = BucketStore(model.named_parameters(), Axis.single("dp"))
    return Optimizer(grads, config or OptimizerConfig(), PrecisionConfig(**precision))


def train_step(model: nn.Module, optimizer: Optimizer, step: int) -> module.StepInfo:
    optimizer.store.zero()
    (loss_of(model, step) * optimizer.loss_scale).backward()
    optimizer.store.reduce()
    return optimizer.step(*STEPS[step % len(STEPS)])


def reference_run(model: nn.Module, config: OptimizerConfig, steps: int) -> list[float]:
    """torch's optimizer with hand-made groups, and torch's clipping."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors}]
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        rule: torch.optim.Optimizer = torch.optim.AdamW(
            groups, betas=betas, eps=config.adam_eps, foreach=False, fused=False
        )
    else:
        rule = torch.optim.SGD(groups, momentum=config.sgd_momentum, foreach=False)
    norms = []
    for step in range(steps):
        rule.zero_grad()
        loss_of(model, step).backward()
        limit = config.clip_grad or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        lr, weight_decay = STEPS[step]
        for group, decay in zip(rule.param_groups, (weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        rule.step()
    return norms


def worst_difference(one: nn.Module, two: nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


CONFIGS = {
    "adam": OptimizerConfig(),
    "adam, other settings": OptimizerConfig(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-5, clip_grad=0.3),
    "adam, no clipping": OptimizerConfig(clip_grad=0.0),
    "sgd": OptimizerConfig(optimizer="sgd"),
    "sgd without momentum": OptimizerConfig(optimizer="sgd", sgd_momentum=0.0),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_torch(name: str, dtype: torch.dtype, gate: float) -> None:
    ours, theirs = make_model(dtype), make_model(dtype)
    wanted = reference_run(theirs, CONFIGS[name], len(STEPS))
    optimizer = make(ours, CONFIGS[name])
    infos = [train_step(ours, optimizer, step) for step in range(len(STEPS))]
    assert [info.grad_norm for info in infos] == pytest.approx(wanted, rel=gate * 10)
    assert worst_difference(ours, theirs) < gate
    limit = CONFIGS[name].clip_grad
    assert [info.clipped for info in infos] == [0 < limit < norm for norm in wanted]
    assert any(info.clipped for info in infos) == (limit > 0), "the case must clip to prove anything"


@pytest.mark.parametrize("dtype", HALF)
def test_half_parameters_have_exact_masters(dtype: torch.dtype) -> None:
    """The masters follow torch's AdamW in fp32 on the same gradients; the model is their rounding."""
    model = make_model(dtype)
    optimizer = make(model, OptimizerConfig(clip_grad=0.0))
    reference = make_model(dtype).float()
    rule = torch.optim.AdamW([{"params": [p]} for p in reference.parameters()], fused=True)
    for step in range(len(STEPS)):
        optimizer.store.zero()
        loss_of(model, step).backward()
        optimizer.store.reduce()
        for group, (name, p) in zip(rule.param_groups, reference.named_parameters(), strict=True):
            p.grad = optimizer.store.grad(name).clone()
            group["lr"], decay = STEPS[step]
            group["weight_decay"] = decay if p.dim() > 1 else 0.0
        rule.step()
        optimizer.step(*STEPS[step])
    for name, p in model.named_parameters():
        master = optimizer.state()[name]["master"]
        assert master.dtype == torch.float32 and torch.equal(master, reference.get_parameter(name))
        assert torch.equal(p, master.to(dtype)) and not torch.equal(p.float(), master)


def test_fp16_skips_overflows_and_then_trains_as_fp32_masters_do() -> None:
    model = make_model(torch.float16)
    optimizer = make(model, fp16=True)
    before = snapshot(optimizer, model)
    infos = []
    while not infos or infos[-1].skipped:
        infos.append(train_step(model, optimizer, 0))
        if infos[-1].skipped:
            assert snapshot(optimizer, model).keys() == before.keys()
            assert all(torch.equal(value, before[key]) for key, value in snapshot(optimizer, model).items())
    skipped = len(infos) - 1
    assert 3 < skipped < 34, "2**32 must overflow fp16 a bounded number of times"
    assert [info.skipped_in_a_row for info in infos] == [*range(1, skipped + 1), 0]
    assert [info.loss_scale for info in infos] == [2.0**32] * 2 + [2.0 ** (32 - i) for i in range(1, skipped)]
    assert not optimizer.static_scale and math.isfinite(infos[-1].grad_norm)
    plain = make_model(torch.float16).float()
    wanted = reference_run(plain, OptimizerConfig(), 1)[0]
    assert infos[-1].grad_norm == pytest.approx(wanted, rel=1e-2)
    assert worst_difference(model, plain) < 1e-2


def snapshot(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    found = {f"{name}/{key}": t.clone() for name, part in optimizer.state().items() for key, t in part.items()}
    return found | {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_bad_gradient_is_named_and_nothing_moves(bad: float, dtype: torch.dtype, clip: float) -> None:
    model = make_model(dtype)
    optimizer = make(model, OptimizerConfig(clip_grad=clip))
    train_step(model, optimizer, 0)
    before = snapshot(optimizer, model)
    optimizer.store.zero()
    loss_of(model, 1).backward()
    optimizer.store.reduce()
    optimizer.store.grad("1.weight")[3, 4] = bad
    optimizer.store.grad("4.bias")[0] = bad
    info = optimizer.step(1e-2, 0.1)
    assert info.skipped and not math.isfinite(info.grad_norm) and optimizer.static_scale
    assert nonfinite_grads(optimizer.store) == ["1.weight", "4.bias"] and nonfinite_grads(optimizer.store, limit=1) == [
        "1.weight"
    ]
    assert all(torch.equal(value, before[key]) for key, value in snapshot(optimizer, model).items())


@pytest.mark.parametrize("scale", [3.0, 0.25])
def test_grad_scale_is_taken_out(scale: float) -> None:
    """The trainer's correction of the expected token count and the loss scale are one factor."""
    plain, scaled = make_model(torch.float64), make_model(torch.float64)
    one, two = make(plain), make(scaled)
    for step in range(3):
        first = train_step(plain, one, step)
        two.store.zero()
        (loss_of(scaled, step) * scale).backward()
        two.store.reduce()
        second = two.step(*STEPS[step], grad_scale=scale)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-13)
    assert worst_difference(scaled, plain) < 1e-13


def test_a_constant_loss_scale_changes_nothing() -> None:
    plain, scaled = make_model(torch.float32), make_model(torch.float32)
    one, two = make(plain), make(scaled, loss_scale=1024.0)
    for step in range(4):
        assert train_step(plain, one, step).grad_norm == train_step(scaled, two, step).grad_norm
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_resume_is_bit_equal(name: str, dtype: torch.dtype, in_place: bool) -> None:
    precision = {"fp16": True, "initial_loss_scale": 2.0**18} if dtype == torch.float16 else {}
    model = make_model(dtype)
    optimizer = make(model, CONFIGS[name], **precision)
    for step in range(5):
        train_step(model, optimizer, step)
    state = copy.deepcopy({name: dict(part) for name, part in optimizer.state().items()})
    extra = copy.deepcopy(optimizer.extra_state())
    weights = copy.deepcopy(model.state_dict())
    wanted = [train_step(model, optimizer, step) for step in range(5, 10)]

    resumed = make_model(dtype)
    again = make(resumed, CONFIGS[name], **precision)
    resumed.load_state_dict(weights)
    assert not in_place or read_into(again, state) == sum(map(len, state.values()))
    again.load_state(state, extra)
    assert [train_step(resumed, again, step) for step in range(5, 10)] == wanted
    for key, value in snapshot(optimizer, model).items():
        assert torch.equal(value, snapshot(again, resumed)[key]), key
    assert again.extra_state() == optimizer.extra_state()


def test_the_state_is_per_name_and_plain() -> None:
    adam, sgd = make(make_model(torch.float32)), make(make_model(torch.bfloat16), CONFIGS["sgd"])
    assert {key for part in adam.state().values() for key in part} == {"exp_avg", "exp_avg_sq"}
    assert {key for part in sgd.state().values() for key in part} == {"momentum_buffer", "master"}
    assert list(adam.state()) == ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "4.weight", "4.bias"]
    assert adam.extra_state() == {"step": 0, "skipped_in_a_row": 0, "loss_scaler": {}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state, extra: state.pop("1.bias"), ["missing in the checkpoint: 1.bias"]),
        (lambda state, extra: state.update(other={}), ["not in this model: other"]),
        (lambda state, extra: state["1.bias"].pop("exp_avg"), ["1.bias", "missing in the checkpoint: exp_avg"]),
        (lambda state, extra: state["1.bias"].update(exp_avg=torch.zeros(3)), ["exp_avg of 1.bias", "(3,)", "(16,)"]),
        (lambda state, extra: state["1.bias"].update(exp_avg=torch.zeros(16).half()), ["float16", "float32"]),
        (lambda state, extra: extra.clear(), ["counters", "step"]),
    ],
)
def test_a_state_that_does_not_fit_is_refused(damage: Callable[..., Any], words: list[str]) -> None:
    optimizer = make(make_model(torch.float32))
    state, extra = copy.deepcopy(optimizer.state()), optimizer.extra_state()
    damage(state, extra)
    with pytest.raises(CheckpointError) as error:
        optimizer.load_state(state, extra)
    assert all(word in str(error.value) for word in [*words, "--no-load-optim"]), error.value


def test_weights_loaded_without_optimizer_state() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make(model)
    with torch.no_grad():
        model[1].weight.fill_(0.5)
    optimizer.refresh_masters()
    assert (optimizer.state()["1.weight"]["master"] == 0.5).all()
    train_step(model, optimizer, 0)
    assert (model[1].weight - 0.5).abs().max() < 0.1


def test_multipliers_of_a_users_own_groups() -> None:
    """lr_mult 0 freezes; wd_mult 0 on a matrix keeps it from decaying."""
    model = make_model(torch.float64)
    before = copy.deepcopy(model)
    rules = {"1.weight": GroupRule(lr_mult=0.0), "4.weight": GroupRule(wd_mult=0.0)}
    grads = BucketStore(model.named_parameters(), Axis.single("dp"))
    optimizer = Optimizer(
        grads, OptimizerConfig(), PrecisionConfig(), rule=lambda name, p: rules.get(name, GroupRule())
    )
    grads.zero()
    grads.reduce()  # no gradient at all: decay is all that moves
    optimizer.step(0.1, 0.5)
    assert torch.equal(model[1].weight, before[1].weight)
    assert torch.equal(model[4].weight, before[4].weight)
    torch.testing.assert_close(model[0].weight, before[0].weight * 0.95)


def test_norms_of_queries_and_keys_decay_where_they_are_asked_to() -> None:
    """Decay alone moves a weight if the gradient's rate is 0: compares the whole model over one step."""
    before_after = {}
    for decays in (None, True):
        made = {"qk_layernorm": True, "apply_wd_to_qk_layernorm": decays, "weight_decay": 0.5, "optimizer": "sgd"}
        _, parts = make_parts(flags(**made, train_iters=1, lr=1e-3, lr_decay_style="constant", sgd_momentum=0.0))
        with parts:
            before = {name: p.detach().clone() for name, p in parts.engine.model.named_parameters()}
            parts.trainer.fit()
            before_after[decays] = before, {n: p.detach().clone() for n, p in parts.engine.model.named_parameters()}
    (start, without), (_, with_decay) = before_after[None], before_after[True]
    for name, tensor in without.items():
        moved = with_decay[name] - tensor
        expected = -1e-3 * 0.5 * start[name] if "q_layernorm" in name or "k_layernorm" in name else 0 * tensor
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-7)
        assert bool(moved.any()) == (".q_layernorm.weight" in name or ".k_layernorm.weight" in name)


def test_numbers_for_the_log() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make(model)
    masters = [part["master"].double().flatten() for part in optimizer.state().values()]
    assert optimizer.params_norm().item() == pytest.approx(torch.cat(masters).norm().item(), rel=1e-7)
    optimizer.store.zero()
    loss_of(model, 0).backward()
    optimizer.store.reduce()
    wanted = sum(int((grad == 0).sum()) for _, grad in optimizer.store.grads())
    assert optimizer.count_zeros() == wanted > 0


def plant_decay_on_biases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "megatron_rule", lambda name, p: GroupRule())
    defaults = {**Optimizer.__init__.__kwdefaults__, "rule": module.megatron_rule}
    patch.setattr(Optimizer.__init__, "__kwdefaults__", defaults)


def plant_coupled_decay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule_of_adam, "adamw", adam)


def plant_clipping_by_the_mean(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        module, "global_norm", lambda groups, *_, **__: 0.9 * torch.stack([t.norm() for t in groups[()]]).sum()
    )


def plant_stale_learning_rate(patch: pytest.MonkeyPatch) -> None:
    step = update_rules.TorchUpdate.step
    patch.setattr(
        update_rules.TorchUpdate, "step", lambda self, d, rates: step(self, d, rates._replace(lr=STEPS[0][0]))
    )


@pytest.mark.parametrize(
    "plant", [plant_decay_on_biases, plant_coupled_decay, plant_clipping_by_the_mean, plant_stale_learning_rate]
)
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    theirs = make_model(torch.float64)
    reference_run(theirs, CONFIGS["adam"], len(STEPS))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        ours = make_model(torch.float64)
        optimizer = make(ours, CONFIGS["adam"])
        for step in range(len(STEPS)):
            train_step(ours, optimizer, step)
    assert worst_difference(ours, theirs) > 1e-6

"""The engine for any model in one process: what it accepts, and the message for what it rejects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.compat import initialize
from megatron.compat.any_model import ModelEngine
from megatron.compat.client_update import ClientUpdate
from megatron.errors import CheckpointError, ConfigError, NonFiniteError, StorageError

BATCH = {"train_batch_size": 4}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10}}


def make(**given: Any) -> ModelEngine:
    torch.manual_seed(0)
    model = given.pop("model", None) or nn.Linear(10, 10)
    config = given.pop("config", None) or {**BATCH, **ADAMW}
    return initialize(model=model, config=config, **given)[0]


def loss_of(engine: ModelEngine, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4, 10, generator=draw), torch.randn(4, 10, generator=draw)
    return F.mse_loss(engine(x), y)


def take_step(engine: ModelEngine, seed: int = 0) -> None:
    engine.backward(loss_of(engine, seed))
    engine.step()


# what it takes


def test_a_configured_optimizer_equals_torchs() -> None:
    params = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6}
    engine = make(config={**BATCH, "optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": 0.5})
    torch.manual_seed(0)
    plain = nn.Linear(10, 10)
    reference = torch.optim.AdamW(plain.parameters(), **params)
    for seed in range(5):
        take_step(engine, seed)
        reference.zero_grad()
        loss_of(plain, seed).backward()  # type: ignore[arg-type]
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    assert torch.allclose(engine.module.weight, plain.weight, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 0.1, "adam_w_mode": False, "weight_decay": 0.1}),
        ("Lion", {}),
    ],
)
def test_configured_optimizers_train_without_a_line(
    kind: str, params: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make(config={**BATCH, "optimizer": {"type": kind, "params": params}})
    before = loss_of(engine).item()
    for _ in range(5):
        take_step(engine)
    assert loss_of(engine).item() < before and capsys.readouterr().out == ""


def test_settings_of_another_program_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    make(config={**BATCH, **ADAMW, "wandb": {"enabled": True}, "steps_per_print": 1})
    assert "no effect in megatron.compat.initialize(model=...); it is for pretrain_gpt.py" in capsys.readouterr().out


def test_a_key_without_effect_names_the_key_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "scheduler": {"params": {"cycle_min_lr": 0.5}}}
    make(config={**BATCH, **ADAMW, **blocks})
    said = capsys.readouterr().out
    assert "overlap_comm true: has no effect without stage 0 or 1 of ZeRO (zero_optimization.stage)" in said
    assert "scheduler.params.cycle_min_lr 0.5: has no effect without scheduler.type OneCycle" in said


def test_what_it_says_of_itself() -> None:
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, **ADAMW, "zero_optimization": {"stage": 0}}
    data = torch.utils.data.TensorDataset(torch.randn(10, 10))
    engine, optimizer, loader, scheduler = initialize(model=nn.Linear(10, 10), config=config, training_data=data)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (12, 4)
    assert engine.gradient_accumulation_steps() == 3 and engine.zero_optimization_stage() == 0
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (0, 0, 1)
    assert engine.device.type in ("cpu", "cuda") and engine.get_lr() == [0.01]
    assert engine.optimizer is optimizer and engine.training_dataloader is loader and scheduler is None
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    first, second = ([batch[0] for batch in loader] for _ in range(2))
    assert len(loader) == len(first) == 2 and not torch.equal(first[0], second[0]), "each epoch has its own order"
    boundaries = []
    for seed in range(4):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        take_step(engine, seed)
    assert boundaries == [False, False, True, False]
    assert engine.global_steps == 1 and engine.was_step_applied()
    assert engine.in_features == 10, "attributes of the model"
    assert set(engine.state_dict()) == {"module.weight", "module.bias"}


def test_the_config_as_a_path_and_as_an_argument(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**BATCH, **ADAMW}))
    for given in (
        {"config": str(file)},
        {"config_params": file},
        {"args": SimpleNamespace(deepspeed_config=str(file))},
    ):
        assert initialize(model=nn.Linear(2, 2), **given)[0].get_lr() == [0.01]


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_inputs_are_cast_and_masters_keep_what_halves_would_lose(half: str) -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    settings: dict[str, Any] = FP16 if half == "fp16" else {"bf16": {"enabled": True}}
    engine = make(model=model, optimizer=optimizer, config={**BATCH, **settings})
    assert engine.module.weight.dtype == (torch.float16 if half == "fp16" else torch.bfloat16)
    before = engine.module.weight.clone()
    master = optimizer.param_groups[0]["params"][0]
    kept = master.clone()
    take_step(engine)
    assert master.dtype == torch.float32 and not torch.equal(master, kept)
    assert torch.equal(engine.module.weight, before), "too small a step for the half, not for its master"


def test_inputs_of_every_shape_reach_the_model() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(10, 10)

        def forward(self, batch: dict[str, Any], *, scale: torch.Tensor, flags: list[bool]) -> torch.Tensor:
            assert batch["ids"].dtype == torch.int64 and flags == [True]
            return self.inner(batch["x"][0]) * scale

    engine = make(model=Odd(), config={**BATCH, **ADAMW, **FP16})
    output = engine({"x": (torch.randn(4, 10),), "ids": torch.arange(4)}, scale=torch.tensor(2.0), flags=[True])
    assert output.dtype == torch.float16


def test_groups_schedulers_and_edits_of_rates_take_effect() -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = make(model=model, optimizer=optimizer, lr_scheduler=schedule, config=BATCH)
    assert engine.get_lr() == [0.5, 0.1]
    take_step(engine)
    assert engine.get_lr() == [0.25, 0.05]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = model.weight.clone()
    take_step(engine)
    assert torch.equal(model.weight, before)


def test_the_configs_scheduler_starts_and_steps(tmp_path: Path) -> None:
    params = {"warmup_num_steps": 4, "total_num_steps": 8, "warmup_type": "linear"}
    config = {**BATCH, **ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    engine, _, _, scheduler = initialize(model=nn.Linear(10, 10), config=config)
    rates = []
    for _ in range(8):
        rates += engine.get_lr()
        take_step(engine)
    assert rates[0] == 0.0 and max(rates) == rates[5] == 0.001 and rates[7] < rates[6] < rates[5]
    engine.save_checkpoint(tmp_path)
    again = initialize(model=nn.Linear(10, 10), config=config)[0]
    again.load_checkpoint(tmp_path)
    assert again.get_lr() == engine.get_lr() == scheduler.get_last_lr()


def test_zero_grad_of_the_optimizer_drops_nothing() -> None:
    """Foreign loops call it before every backward pass, even in the middle of an accumulation."""
    found = []
    for calls in (False, True):
        engine = make(config={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, **ADAMW})
        for seed in range(2):
            if calls:
                engine.optimizer.zero_grad()
            take_step(engine, seed)
        found.append(engine.module.weight.clone())
    assert torch.equal(*found)


def test_no_sync_adds_up() -> None:
    engine, plain = make(), make()
    with engine.no_sync():
        for seed in range(2):
            engine.backward(loss_of(engine, seed))
    take_step(engine, 2)
    plain.backward(loss_of(plain, 0) + loss_of(plain, 1) + loss_of(plain, 2))
    plain.step()
    assert torch.allclose(engine.module.weight, plain.module.weight, atol=1e-7)


def test_a_loss_may_pass_through_another_engine() -> None:
    """A GAN's generator loss passes through its judge, which must not be updated by it."""
    found = []
    for passes in (False, True):
        torch.manual_seed(0)
        judge, generator = make(), make()
        take_step(judge)
        if passes:
            draw = torch.Generator().manual_seed(5)
            generator.backward(judge(generator(torch.randn(4, 10, generator=draw))).mean())
            generator.step()
            assert generator.get_global_grad_norm() > 0
        take_step(judge, 1)
        found.append(judge.module.weight.clone())
    assert torch.equal(*found)


def test_a_loss_scale_comes_down_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    engine = make(config={**BATCH, **ADAMW, **settings})
    for seed in range(30):
        take_step(engine, seed)
    assert engine.skipped_steps > 0 and engine.was_step_applied() and engine.cur_scale < 2.0**32
    assert "step 1 is skipped: a gradient overflows at the loss scale 4.29497e+09" in capsys.readouterr().out


def test_state_in_host_memory_is_the_same_update() -> None:
    """Both places are host memory on a CPU, so this tests only that every copy is made."""
    weights = []
    for on_host in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(10, 10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine = make(model=model, optimizer=optimizer, config=BATCH)
        if on_host:
            engine._core._update = engine._core._client = ClientUpdate(engine._grads, optimizer, on_host=True)
            assert optimizer.param_groups[0]["params"][0] is not model.weight
        for seed in range(3):
            take_step(engine, seed)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


# what it refuses


def without_model() -> None:
    initialize(model=None, config=BATCH)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "no model": (without_model, "no model"),
    "a class for a model": (lambda: initialize(model=nn.Linear, config=BATCH), "model is the class Linear"),
    "no config": (lambda: initialize(model=nn.Linear(2, 2)), "no config"),
    "two configs": (
        lambda: initialize(model=nn.Linear(2, 2), config=BATCH, config_params=BATCH),
        "config and config_params are both given",
    ),
    "a list for a config": (lambda: initialize(model=nn.Linear(2, 2), config=[1]), "config is a list"),
    "a missing file": (lambda: make(config="/nonexistent.json"), "^config /nonexistent.json: no such file"),
    "model parallelism": (lambda: make(mpu=object()), "mpu is not supported"),
    "a closure": (
        lambda: (lambda model: make(model=model, optimizer=torch.optim.LBFGS(model.parameters())))(nn.Linear(10, 10)),
        "LBFGS recomputes the loss",
    ),
    "no optimizer": (lambda: make(config=BATCH), "no optimizer"),
    "an optimizer's class": (
        lambda: make(config=BATCH, optimizer=torch.optim.AdamW),
        r"optimizer is the class AdamW; give an instance, AdamW\(model.parameters\(\), lr=...\)",
    ),
    "another model's optimizer": (
        lambda: make(config=BATCH, optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters())),
        "2 of the optimizer's 2 parameters are not parameters of the model",
    ),
    "another optimizer's scheduler": (
        lambda: make(
            lr_scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 1)
        ),
        "lr_scheduler belongs to another optimizer",
    ),
    "a scheduler without step": (lambda: make(lr_scheduler=3), "lr_scheduler is a int without step"),
    "no batch size": (lambda: make(config=ADAMW), "train_batch_size: missing"),
    "a batch that does not divide": (
        lambda: make(config={"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, **ADAMW}),
        "train_batch_size 10: is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 1 ranks = 8",
    ),
    "three sizes that do not fit": (
        lambda: make(
            config={
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                **ADAMW,
            }
        ),
        "= 8; change one of them",
    ),
    "two precisions": (
        lambda: make(config={**BATCH, **ADAMW, **FP16, "bf16": {"enabled": True}}),
        "exclude each other",
    ),
    "an unknown key": (lambda: make(config={**BATCH, "optimiser": {}}), r"optimiser: unknown key \(did you mean opt"),
    "no length of the decay": (
        lambda: make(config={**BATCH, **ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": {}}}),
        "total_num_steps",
    ),
    "state in files": (
        lambda: make(
            config={
                **BATCH,
                **ADAMW,
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            }
        ),
        "keeps optimizer state in memory",
    ),
    "parameters in files": (
        lambda: make(config={**BATCH, **ADAMW, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}),
        "zero_optimization.offload_param.device nvme of config: parameters are kept in host memory",
    ),
    "Muon": (
        lambda: make(config={**BATCH, "optimizer": {"type": "Muon"}}),
        "in config: optimizer.type Muon: not supported for your own model, because it is unknown which parameters",
    ),
    "a number as text": (lambda: make(config={**ADAMW, "train_batch_size": "4"}), 'train_batch_size "4": not a whole'),
    "a number out of range": (
        lambda: make(config={**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": -1}}}),
        "in config: optimizer.params.lr -1: out of range; give a number of at least 0",
    ),
    "no such stage": (
        lambda: make(config={**BATCH, **ADAMW, "zero_optimization": {"stage": 4}}),
        "in config: zero_optimization.stage 4: no such choice; choose from 0, 1, 2, 3",
    ),
    "a model that is frozen": (
        lambda: make(model=nn.Linear(2, 2).requires_grad_(False), config={**BATCH, **ADAMW}),
        "nothing is trained",
    ),
    "a model without parameters": (lambda: make(model=nn.ReLU(), config={**BATCH, **ADAMW}), "nothing is trained"),
    "names for parameters": (
        lambda: make(model_parameters=["weight"], config={**BATCH, **ADAMW}),
        "model_parameters is not a list of parameters",
    ),
    "a scheduler's class": (
        lambda: make(lr_scheduler=torch.optim.lr_scheduler.StepLR),
        r"the class StepLR; give an instance made from the optimizer, or .*StepLR\(optimizer, ...\)",
    ),
    "data without a length": (lambda: make(training_data=5), "training_data is a int without a length"),
    "data for no micro-batch": (lambda: make(training_data=[torch.zeros(2)]), "has 1 samples for 1 ranks"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_at_the_start_is_one_line(name: str) -> None:
    call, said = MISTAKES[name]
    with pytest.raises(ConfigError, match=said) as error:
        call()
    assert "\n" not in str(error.value)
    assert " --" not in f" {error.value}", "there are no flags here"


def a_file(text: str, path: Path) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        make(config=str(path))
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": 4, // one rank\n}', "JSON has no comments, remove it"),
        ('{"fp16": {"enabled": True}}', "column 22: JSON has no True, write true"),
        ("{'train_batch_size': 4}", """JSON has no ', write \""""),
        ('{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}', "train_batch_size 10: is not train_micro"),
    ],
)
def test_a_mistake_in_a_file_names_it(text: str, said: str, tmp_path: Path) -> None:
    line = a_file(text, tmp_path / "ds.json")
    assert said in line and f"{tmp_path}/ds.json: " in line and "\n" not in line


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"at .*file/global_step0: .*writable, or give another"):
        make().save_checkpoint(tmp_path / "file")


def in_evaluation(engine: ModelEngine) -> None:
    engine.eval()
    engine.backward(loss_of(engine))


def without_gradient(engine: ModelEngine) -> None:
    with torch.no_grad():
        loss = loss_of(engine)
    engine.backward(loss)


def twice(engine: ModelEngine) -> None:
    engine.backward(loss_of(engine))
    engine.backward(loss_of(engine))


def by_hand(engine: ModelEngine) -> None:
    engine.backward(loss_of(engine))
    engine.optimizer.step()


def dropped(engine: ModelEngine) -> None:
    engine.backward(loss_of(engine))
    engine.zero_grad()


def inside_no_sync(engine: ModelEngine) -> None:
    with engine.no_sync():
        engine.backward(loss_of(engine))
        engine.step()


def half_done(engine: ModelEngine) -> None:
    engine.backward(loss_of(engine))
    engine.save_checkpoint("never")


WRONG_ORDERS: dict[Callable[[ModelEngine], Any], str] = {
    ModelEngine.step: r"there was no engine.backward\(loss\)",
    in_evaluation: r"evaluation mode; call engine.train\(\)",
    without_gradient: "the loss has no gradient",
    twice: r"called again before engine.step\(\)",
    by_hand: r"optimizer.step\(\): .* call engine.step\(\) instead",
    dropped: "would drop the gradients of 1 of 1 micro-batches",
    inside_no_sync: r"was called inside no_sync\(\)",
    half_done: "1 of 1 micro-batches of an update are done",
    lambda engine: engine.backward(engine(torch.randn(4, 10))): "a tensor of shape (4, 10), not one number",
    lambda engine: engine.backward(1.0): "the loss is float, not one number",
    lambda engine: engine.half(): "set the precision in the config",
}


@pytest.mark.parametrize("call", WRONG_ORDERS, ids=lambda call: call.__name__)
def test_a_wrong_order_of_calls_is_one_line(call: Callable[[ModelEngine], Any]) -> None:
    engine = make()
    with pytest.raises(ConfigError, match=WRONG_ORDERS[call].replace("(4, 10)", r"\(4, 10\)")) as error:
        call(engine)
    assert "\n" not in str(error.value)


def test_to_where_it_is_already_is_no_mistake() -> None:
    engine = make()
    assert engine.to(engine.device) is engine and engine.float() is engine


def test_numbers_that_are_not_finite_stop_with_their_names() -> None:
    engine = make()
    before = engine.module.weight.clone()
    engine.backward(loss_of(engine) * math.inf)
    with pytest.raises(NonFiniteError, match=r"step 1: a gradient is not finite; first non-finite gradients: weight"):
        engine.step()
    assert torch.equal(engine.module.weight, before)


# checkpoints


def test_checkpoints_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    engine = make()
    take_step(engine)
    with pytest.raises(ConfigError, match=r"client_state\.model: is a Linear, but a checkpoint holds"):
        engine.save_checkpoint(tmp_path / "a", client_state={"model": nn.Linear(1, 1)})
    with pytest.raises(ConfigError, match=r"'\.\./a' is not a directory name"):
        engine.save_checkpoint(tmp_path / "a", tag="../a")
    with pytest.raises(ConfigError, match="has no file latest"):
        (tmp_path / "a").mkdir(exist_ok=True)
        engine.load_checkpoint(tmp_path / "a")
    with pytest.raises(ConfigError, match="does not exist"):
        engine.load_checkpoint(tmp_path / "none")
    engine.save_checkpoint(tmp_path / "b", tag="best")
    (tmp_path / "b" / "logs").mkdir()
    with pytest.raises(ConfigError, match="has no tag 'worst'; it has best"):
        engine.load_checkpoint(tmp_path / "b", tag="worst")


def test_another_optimizer_or_rate_is_refused_and_weights_alone_are_not(tmp_path: Path) -> None:
    engine = make()
    take_step(engine)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    other = make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        other.load_checkpoint(tmp_path)
    faster = make(config={**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}})
    with pytest.raises(CheckpointError, match=r"lr of parameter group 0 is 0\.5 here and 0\.01 in the checkpoint"):
        faster.load_checkpoint(tmp_path)
    fresh = make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    _, client_state = fresh.load_checkpoint(tmp_path, load_module_only=True)
    assert client_state == {"epoch": 3} and fresh.global_steps == 0
    assert torch.equal(fresh.module.weight, engine.module.weight)


def test_a_tag_saved_twice_keeps_the_last(tmp_path: Path) -> None:
    engine = make()
    for number in range(3):
        take_step(engine, number)
        engine.save_checkpoint(tmp_path, tag="best", client_state={"number": number})
    engine.save_checkpoint(tmp_path, tag="best", client_state={"number": 9})
    assert make().load_checkpoint(tmp_path)[1] == {"number": 9}

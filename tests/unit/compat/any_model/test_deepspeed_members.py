"""Public members of DeepSpeed's engine (0.19.6; tests/golden/deepspeed_engine.txt): each works, or one line names the
replacement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.compat import initialize
from megatron.compat.any_model import ModelEngine
from megatron.errors import ConfigError, NonFiniteError
from tests.helpers.runs import REPOSITORY

GOLDEN = [
    line.split(": ", 1)
    for line in (REPOSITORY / "tests/golden/deepspeed_engine.txt").read_text(encoding="utf-8").splitlines()
]
PARAMS = {"lr": 0.5, "betas": [0.8, 0.9]}
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": PARAMS},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "fp16": {"enabled": True, "initial_scale_power": 10},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
}


def each(names: str, value: Any = None) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


EXPECTED: dict[str, Any] = {
    "train_batch_size()": 8,
    "train_micro_batch_size_per_gpu()": 2,
    "gradient_accumulation_steps()": 4,
    "get_batch_info()": (8, 2, 4),
    "optimizer_name()": "adamw",
    "optimizer_params()": PARAMS,
    "scheduler_name()": "WarmupLR",
    "scheduler_params()": {"warmup_num_steps": 3},
    "fp16_enabled()": True,
    "bfloat16_enabled()": False,
    "get_data_types()": (torch.float16, torch.float32),
    "loss_scale()": 0.0,
    "dynamic_loss_scale()": True,
    "initial_dynamic_scale()": 1024.0,
    "cur_scale": 1024.0,
    "zero_optimization()": True,
    "zero_optimization_stage()": 1,
    "zero_optimization_partition_gradients()": False,
    "zero_optimization_partition_weights()": False,
    "zero_overlap_comm()": True,
    "zero_cpu_offload()": True,
    "zero_use_cpu_optimizer()": True,
    "zero_offload_optimizer()": {"device": "cpu"},
    "zero_offload_param()": None,
    "zero_allow_untested_optimizer()": False,
    "gradient_clipping()": 0.5,
    "steps_per_print()": 7,
    "get_lr()": [0.0],
    "get_mom()": [(0.8, 0.9)],
    "get_type()": [0.0],
    "get_global_grad_norm()": None,
    "was_step_applied()": False,
    "is_gradient_accumulation_boundary()": False,
    "get_data_parallel_rank()": 0,
    **dict.fromkeys(("dp_world_size", "world_size"), 1),
    **dict.fromkeys(("global_rank", "local_rank", "global_samples", "global_steps", "micro_steps", "skipped_steps"), 0),
    "is_compiled": False,
    "training_dataloader": None,
    # what DeepSpeed's own has without the block that turns it on
    **each("block_eigenvalue eigenvalue flops_profiler mesh_device mpu progressive_layer_drop quantizer"),
    **each("get_pld_theta() zenflow_config() zeropp_loco_param() empty_partition_cache()"),
    **each("gate_modules moe_layers num_experts summary_events", ()),
    **each("mp_world_size sequence_parallel_size seq_dp_world_size zero_hpz_partition_size()", 1),
    **each("get_model_parallel_rank() get_tensor_parallel_rank() autotp_size()", 0),
    "mics_shard_size()": -1,
    "zero_partial_offload()": 1.0,
    **each(
        "managed_gradient_accumulation() dataloader_drop_last() zero_ignore_unused_parameters() "
        "checkpoint_tag_validation_enabled() checkpoint_tag_validation_fail() zero_contiguous_gradients() "
        "zero_gather_16bit_weights_on_model_save()",
        True,
    ),
    **each(
        "amp_enabled() torch_autocast_enabled() autotuning_enabled() compile_autosp() compile_autotp() "
        "curriculum_enabled_legacy() curriculum_learning_enabled() data_efficiency_enabled() data_sampling_enabled() "
        "eigenvalue_enabled() elasticity_enabled() flops_profiler_enabled() pld_enabled() quantize_training() "
        "random_ltd_enabled() is_elastic_model_parallel_supported() is_deepcompile_active() is_deepcompile_enabled() "
        "is_sanity_checks_enabled() graph_harvesting() dump_state() memory_breakdown() wall_clock_breakdown() "
        "optimizer_legacy_fusion() super_offload() sparse_gradients_enabled() use_node_local_storage() "
        "uses_parallelization_pass_only() fp16_master_weights_and_gradients() bf16_master_weights_and_gradients() "
        "bf16_optimizer_states() zero_legacy_stage1() zero_nvme_offload_optimizer() zero_quantized_gradients() "
        "zero_quantized_weights() zero_quantized_nontrainable_weights() has_moe_layers pipeline_parallelism "
        "optimized_linear_base_weight_sharding optimized_linear_lora_enabled torch_autocast_z0_gradscaler",
        False,
    ),
}
ACTING = {
    *each("train() eval() forward() backward() step() zero_grad() no_sync() optimizer lr_scheduler"),
    *each("load_checkpoint() save_checkpoint() save_16bit_model() save_fp16_model() module_state_dict()"),
    *each("set_gradient_accumulation_boundary() set_train_batch_size() set_train_micro_batch_size()"),
    *each("set_lr() compile() destroy() device"),
}
"""Members tested below and in test_any_model.py."""


def make(model: nn.Module | None = None, **config: Any) -> ModelEngine:
    torch.manual_seed(0)
    given = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    return initialize(model=model or nn.Linear(4, 4), config=given)[0]


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], seed: int) -> torch.Tensor:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    return F.mse_loss(model(x), x.flip(-1))


def take_step(engine: ModelEngine, seed: int = 0) -> None:
    engine.backward(loss_of(engine, seed))
    engine.step()


def member(engine: ModelEngine, name: str) -> Any:
    found = getattr(engine, name.removesuffix("()"))
    return found() if name.endswith("()") else found


def test_every_member_works_or_one_line_says_what_to_call() -> None:
    engine = make(**CONFIG)
    works = {name for name, outcome in GOLDEN if outcome == "works"}
    assert works == EXPECTED.keys() | ACTING and len(GOLDEN) > 280
    for name, outcome in GOLDEN:
        if name in EXPECTED:
            assert member(engine, name) == EXPECTED[name], name
        elif name in ACTING:
            assert not name.endswith("()") or callable(getattr(engine, name.removesuffix("()")))
        else:
            with pytest.raises(ConfigError) as error:
                member(engine, name)
            assert str(error.value) == f"engine.{name}: {outcome}" and "\n" not in outcome


def test_attributes_of_the_model_come_first_and_unknown_ones_are_attribute_errors() -> None:
    model = nn.Linear(4, 4)
    model.config = {"hidden": 4}  # type: ignore[assignment]
    engine = make(model)
    assert engine.config == {"hidden": 4}
    with pytest.raises(ConfigError, match=r"engine.monitor = ...: the engine sends no metrics"):
        engine.monitor = None
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018


# accumulation


def plain(steps: list[list[int]], weights: list[float] | None = None) -> torch.Tensor:
    """Torch's own loop: each step adds up these micro-batches with their weights (default: their mean)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seeds in steps:
        optimizer.zero_grad()
        for number, seed in enumerate(seeds):
            weight = 1 / len(seeds) if weights is None else weights[number]
            (weight * loss_of(model, seed)).backward()  # type: ignore[arg-type]
        optimizer.step()
    return model.weight.detach()


def same(engine: ModelEngine, wanted: torch.Tensor) -> bool:
    return torch.allclose(engine.module.weight, wanted, atol=1e-6)


STAGES = [{}, {"zero_optimization": {"stage": 1}}]


@pytest.mark.parametrize("stage", STAGES)
def test_batches_change_between_updates(stage: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    engine = make(train_batch_size=6, train_micro_batch_size_per_gpu=2, **stage)
    for seed in range(3):
        take_step(engine, seed)
    engine.set_train_batch_size(4)
    assert engine.get_batch_info() == (4, 2, 2)
    for seed in range(3, 6):
        assert engine.is_gradient_accumulation_boundary() == (seed == 4)
        take_step(engine, seed)
    with pytest.raises(ConfigError, match=r"set_train_batch_size\(\): 1 of 2 micro-batches of an update are done"):
        engine.set_train_batch_size(2)
    take_step(engine, 6)
    assert same(engine, plain([[0, 1, 2], [3, 4], [5, 6]]))
    assert (engine.global_steps, engine.global_samples) == (3, 6 + 4 + 4)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (10, 5, 2)
    with pytest.raises(ConfigError, match=r"set_train_batch_size\(\): train_batch_size 7: is not"):
        engine.set_train_batch_size(7)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("steps_between", [False, True])
def test_a_boundary_of_ones_own(stage: dict[str, Any], steps_between: bool) -> None:
    engine = make(train_batch_size=6, train_micro_batch_size_per_gpu=2, **stage)
    seeds = [[0, 1, 2], [3], [4, 5, 6, 7]]
    for group in seeds:
        for seed in group:
            engine.set_gradient_accumulation_boundary(seed == group[-1])
            engine.backward(loss_of(engine, seed), scale_wrt_gas=False)
            if steps_between or seed == group[-1]:
                engine.step()
    assert engine.global_steps == 3 and same(engine, plain(seeds, [1.0] * 4))
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss_of(engine, 0))
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(ConfigError, match="called after the last backward pass; call it before"):
        engine.step()
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()


def test_a_loss_that_the_accumulation_does_not_divide() -> None:
    engine = make(train_batch_size=4, train_micro_batch_size_per_gpu=2)
    for seed, weight in enumerate((0.25, 0.75)):
        loss = loss_of(engine, seed) * weight
        assert engine.backward(loss, scale_wrt_gas=False) == loss
        engine.step()
    assert same(engine, plain([[0, 1]], [0.25, 0.75]))


# the model


@pytest.mark.parametrize("frozen", [False, True])
def test_saved_weights_are_those_of_the_model(frozen: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    engine = make(model, bf16={"enabled": True})
    assert engine.save_16bit_model(tmp_path / "new", exclude_frozen_parameters=frozen) is True
    found = torch.load(tmp_path / "new" / "pytorch_model.bin", weights_only=True)
    wanted = {name: one for name, one in model.state_dict().items() if not frozen or name.startswith("1.")}
    assert found.keys() == wanted.keys() == engine.module_state_dict(exclude_frozen_parameters=frozen).keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) and found["1.weight"].dtype == torch.bfloat16
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["pytorch_model.bin"]


def test_a_checkpoint_that_latest_does_not_name(tmp_path: Path) -> None:
    engine = make()
    take_step(engine)
    engine.save_checkpoint(tmp_path, save_latest=False)
    with pytest.raises(ConfigError, match="no file latest"):
        engine.load_checkpoint(tmp_path)
    again = make()
    again.load_checkpoint(tmp_path, "global_step1")
    assert (again.global_steps, again.global_samples) == (1, 4)
    for refused in ({"load_module_strict": False}, {"custom_load_fn": print}):
        with pytest.raises(ConfigError, match="not supported, because a checkpoint fits only the model"):
            again.load_checkpoint(tmp_path, "global_step1", **refused)
    with pytest.raises(ConfigError, match="exclude_frozen_parameters is not supported"):
        again.save_checkpoint(tmp_path, exclude_frozen_parameters=True)


TYPES = each(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)


def with_buffers(value: float) -> nn.Module:
    model = nn.Linear(4, 4)
    for name in TYPES:
        model.register_buffer(f"of_{name}", torch.full((3,), value).to(getattr(torch, name)))
    return model


def test_buffers_of_every_type_are_saved_and_loaded(tmp_path: Path) -> None:
    saved, loaded = make(with_buffers(1.0)), make(with_buffers(4.0))
    saved.save_checkpoint(tmp_path)
    loaded.load_checkpoint(tmp_path)
    wanted = dict(saved.module.named_buffers())
    for name, buffer in loaded.module.named_buffers():
        assert buffer.dtype == wanted[name].dtype and buffer.tolist() == wanted[name].tolist(), name
    saved.module.of_float8_e5m2.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="of_float8_e5m2 holds NaN or infinite values"):
        saved.save_checkpoint(tmp_path / "again")


@pytest.mark.parametrize("stage", STAGES)
def test_a_destroyed_engine_leaves_a_plain_model(stage: dict[str, Any]) -> None:
    engine = make(**stage)
    take_step(engine, 0)
    engine.destroy()
    loss = loss_of(engine, 1)
    with pytest.raises(ConfigError, match=r"engine.destroy\(\) was called"):
        engine.backward(loss)
    model = engine.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()
    assert torch.allclose(model.weight, plain([[0], [1]]), atol=1e-6)
    model.zero_grad()
    take_step(again := make(model, **stage), 2)
    assert same(again, plain([[0], [1], [2]]))


def test_rates_and_momenta_of_ones_own_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 1.0}], lr=0.1, momentum=0.9)
    engine = initialize(model=model, optimizer=optimizer, config={"train_batch_size": 4})[0]
    assert (engine.optimizer_name(), engine.get_mom(), engine.get_lr()) == ("SGD", [0.9, 0.9], [0.1, 1.0])
    assert engine.optimizer_params() is None and engine.scheduler_name() is None
    engine.set_lr(0.3)
    assert engine.get_lr() == [0.3, 0.3]


def test_a_compiled_model_trains_alike() -> None:
    engine = make()
    engine.compile(backend="eager")
    assert engine.is_compiled
    take_step(engine)
    assert same(engine, plain([[0]]))

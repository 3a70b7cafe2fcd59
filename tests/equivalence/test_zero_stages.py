"""ZeRO 2 and 3 against the plain optimizer in one process, and checkpoints of one stage in another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megatron.data_parallel import FullySharded
from megatron.prove.check_layout.outcome import RankOutcome, RunOutcome, join, train_outcome
from megatron.training.assemble import Parts
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import few_batches, whole_state, worst
from tests.helpers.runs import LLAMA_SHAPE, flags, make_parts

STEPS = 3
DISK = {"optimizer": "adam", "optimizer_offload_directory": tempfile.gettempdir()}
BATCH = {"global_batch_size": 12}
SHAPE: dict[str, Any] = {
    "micro_batch_size": 1,
    "train_iters": STEPS,
    "log_interval": STEPS,
    "kernels": "ref",
    "hidden_dropout": 0,
    "attention_dropout": 0,
}
LLAMA = {**LLAMA_SHAPE, "group_query_attention": True, "num_query_groups": 2}
ONE_GROUP = {**LLAMA, "num_query_groups": 1}
NEOX = {"position_embedding_type": "rope", "rotary_percent": 0.5, "use_parallel_residual": True}
# Norms of what small weights give multiply its rounding, and Adam that of small gradients: with weights of std 0.02,
# the kernels of one process are 7e-11 apart after these steps.
OLMO = {**LLAMA, "norm_placement": "after", "qk_layernorm": True, "qk_layernorm_scope": "all", "init_method_std": 0.2}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True}
TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


def train(rank: int, world: int, cases: Sequence[Sequence[str]], dtype: torch.dtype) -> list[RankOutcome]:
    torch.set_num_threads(1)
    outcomes = []
    for argv in cases:
        _, parts = make_parts(argv, rank=rank, world_size=world, dtype=dtype)
        with parts:
            outcomes.append(train_outcome(parts, STEPS))
    return outcomes


@cache
def plain(argv: tuple[str, ...], dtype: torch.dtype = torch.float64) -> RunOutcome:
    return join(train(0, 1, [argv], dtype))


def errors(world: int, cases: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[float]:
    """Worst relative difference from one process, for each case (settings of the model, of the layout)."""
    models = [few_batches(world, {**SHAPE, **model}, layout) for model, layout in cases]
    argvs = [flags(**model, **layout) for model, (_, layout) in zip(models, cases)]
    results = run_ranks(world, train, world, argvs, torch.float64, timeout=60.0 * len(cases))
    outcomes = [join([rank[number] for rank in results]) for number in range(len(cases))]
    return [worst(got, plain(tuple(flags(**model)))) for got, model in zip(outcomes, models, strict=True)]


CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    2: [
        ({}, {"zero_stage": 2}),
        (LLAMA, {"zero_stage": 3, **FULL}),
        ({**LLAMA, "optimizer": "lion"}, {"zero_stage": 2}),
        ({}, {"zero_stage": 2, "context_parallel_size": 2}),
        (EXPERTS, {"zero_stage": 2, "expert_model_parallel_size": 2}),
    ],
    3: [({"global_batch_size": 6}, {"zero_stage": 3})],
    4: [
        (LLAMA, {"zero_stage": 2, **TP, "sequence_parallel": True}),
        (NEOX, {"zero_stage": 3, **TP}),
        (OLMO, {"zero_stage": 3, **TP, "sequence_parallel": True}),
        ({}, {"zero_stage": 3, **PP, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]}),
        ({**LLAMA, "optimizer": "lion"}, {"zero_stage": 3, **TP}),
        (LLAMA, {"zero_stage": 2, **PP, "pipeline_schedule": "gpipe"}),
        ({"num_layers": 4}, {"zero_stage": 3, **PP, "num_layers_per_virtual_pipeline_stage": 1}),
        (EXPERTS, {"zero_stage": 3, "expert_model_parallel_size": 2}),
    ],
    8: [
        ({}, {"zero_stage": 2, **TP, **PP}),
        (LLAMA, {"zero_stage": 3, **TP, **PP, "sequence_parallel": True}),
        (ONE_GROUP, {"zero_stage": 3, "tensor_model_parallel_size": 4}),
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_equals_the_plain_optimizer(world: int) -> None:
    found = errors(world, CASES[world])
    assert max(found) < 1e-10, found


def plant_mean(patch: pytest.MonkeyPatch) -> None:
    divide = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda module, factor: divide(module, 2.0))


def plant_old_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullySharded, "publish", lambda sharded: None)


def plant_last_batch_not_reduced(patch: pytest.MonkeyPatch) -> None:
    def arm(sharded: FullySharded) -> None:
        sharded._units[-1].module.set_requires_gradient_sync(False)

    patch.setattr(FullySharded, "arm", arm)


def plant_gradients_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullySharded, "zero", lambda sharded: sharded.grads())


def plant_a_shard_that_is_not_updated(patch: pytest.MonkeyPatch) -> None:
    zero, publish = FullySharded.zero, FullySharded.publish
    before: dict[str, torch.Tensor] = {}

    def begin(sharded: FullySharded) -> None:
        before.update((name, sharded.weight(name).clone()) for name in sharded.names if name.endswith("dense.weight"))
        zero(sharded)

    def end(sharded: FullySharded) -> None:
        for name, weight in before.items():
            sharded.weight(name).detach().copy_(weight)
        publish(sharded)

    patch.setattr(FullySharded, "zero", begin)
    patch.setattr(FullySharded, "publish", end)


@pytest.mark.parametrize(
    "plant",
    [
        plant_mean,
        plant_old_weights,
        plant_last_batch_not_reduced,
        plant_gradients_of_the_step_before,
        plant_a_shard_that_is_not_updated,
    ],
)
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    (found,) = errors(2, [({}, {"zero_stage": 2})])
    assert found > 1e-6


State = dict[str, torch.Tensor]


def state_of(parts: Parts) -> State:
    """Weights and optimizer state of this rank's part, as whole tensors."""
    state = {name: tensor.detach().clone() for name, tensor in parts.engine.whole_weights()}
    for name, kinds in whole_state(parts.trainer.engine.optimizer).items():
        state |= {f"{name} {kind}": tensor.clone() for kind, tensor in kinds.items()}
    return state


def train_and_resume(rank: int, world: int, folder: Path, stages: Sequence[int], argv: Sequence[str]) -> list[State]:
    """States of the first stage after two (saved) and four steps; of each stage when loaded and two steps later."""
    torch.set_num_threads(1)
    where = {"rank": rank, "world_size": world}
    saving = [*argv, "--save", str(folder), "--save-interval", "2", "--zero-stage", str(stages[0])]
    states = []
    _, parts = make_parts(saving, **where)
    with parts:
        parts.trainer.fit(2)
        states.append(state_of(parts))
        parts.trainer.fit(2)
        states.append(state_of(parts))
    for stage in stages:
        _, parts = make_parts([*argv, "--load", str(folder), "--ckpt-step", "2", "--zero-stage", str(stage)], **where)
        with parts:
            states.append(state_of(parts))
            parts.trainer.fit(2)
            states.append(state_of(parts))
    return states


def test_a_state_in_a_file_is_that_of_the_plain_optimizer() -> None:
    """Gradients are not compared: torch's update scales them in place; this one does not."""
    layouts = {2: [{"zero_stage": 2}], 3: [{"zero_stage": 3}], 4: [{"zero_stage": 3, **TP}, {"zero_stage": 2, **PP}]}
    wanted = plain(tuple(flags(**SHAPE, **BATCH, optimizer="adam")))
    for world, cases in layouts.items():
        argvs = [flags(**SHAPE, **BATCH, **DISK, **layout) for layout in cases]
        results = run_ranks(world, train, world, argvs, torch.float64, timeout=120.0)
        for number in range(len(cases)):
            got = join([rank[number] for rank in results])
            assert worst(replace(got, gradients=wanted.gradients), wanted) < 1e-10, cases[number]


@pytest.mark.parametrize(
    ("world", "layout"), [(2, {"kernels": "auto"}), (2, DISK), (4, {**TP, "sequence_parallel": True})]
)
@pytest.mark.parametrize("stages", [(1, 2, 3), (3, 0, 1)])
def test_a_checkpoint_of_one_stage_is_one_of_every_stage(
    tmp_path: Path, world: int, layout: Mapping[str, Any], stages: tuple[int, ...]
) -> None:
    family = few_batches(world, {**SHAPE, "vocab_size": 90, "bf16": True}, layout)
    argv = flags(**{**family, **layout})
    for ranks in run_ranks(world, train_and_resume, world, tmp_path, stages, argv, timeout=120.0):
        saved, gone_on, *loaded = ranks
        for state in loaded[::2]:
            assert equal(state, saved), "a load changes something"
        assert equal(loaded[1], gone_on), "resuming is not going on"
        for state in loaded[3::2]:
            assert close(state, gone_on)


def equal(one: State, other: State) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], tensor) and one[name].dtype == tensor.dtype for name, tensor in other.items())


def close(one: State, other: State) -> bool:
    """Allows a difference, because bf16 rounds nearly equal weights to neighbouring values."""
    return all((one[name] - tensor).abs().max() < 0.02 * tensor.abs().max() for name, tensor in other.items())

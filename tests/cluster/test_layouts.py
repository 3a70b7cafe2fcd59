"""Every layout of the equivalence suites: all members of a communicator issue the same operations in the same order,
and no rank waits for ever. A new run starts, makes two steps, evaluates, saves and stops; another resumes from a
checkpoint."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config import RunConfig, parse_args
from megatron.optimizer import Optimizer
from megatron.prove.order.classes import difference, representative
from megatron.prove.order.cluster import (
    ClusterRecording,
    by_one_process,
    record_clusters,
    record_runs,
    save_by_one_process,
)
from megatron.prove.order.waits import play
from tests.cluster.test_host_waits import few_layers
from tests.equivalence import (
    test_context_parallel,
    test_data_parallel,
    test_instances,
    test_model_parallel,
    test_moe,
    test_optimizers,
    test_zero,
    test_zero_stages,
)
from tests.helpers.layouts import two_rounds
from tests.helpers.runs import TINY, flags, pretrain_gpt

Case = tuple[int, dict[str, Any], dict[str, Any]]
TWO_STEPS = {"train_iters": 2}
EVERYTHING = {
    "kernels": "ref",  # which operations compute changes nothing that ranks ask of each other
    "eval_interval": 2,
    "eval_iters": 1,
    "exit_signal_handler": True,
    "exit_duration_in_mins": 1000,
}


ZERO = SimpleNamespace(
    __name__="test_zero", CASES={n: test_zero.LONGER.get(n, []) + test_zero.FEW.get(n, []) for n in (2, 4, 8)}
)
SUITES = (
    *(test_model_parallel, test_context_parallel, test_moe, test_data_parallel, ZERO, test_zero_stages),
    test_instances,
)


def cases(suite: Any) -> list[Case]:
    """(ranks, family, axes), each layout once: models differ in what they compute, not in which ranks communicate."""
    found: dict[str, Case] = {}
    for ranks, some in suite.CASES.items():
        for family, axes in some:
            if ranks > 1:
                few = few_layers({*family, *axes}, axes.get("pipeline_model_parallel_size", 1))
                found.setdefault(f"{ranks} {axes} {'num_experts' in family}", (ranks, {**family, **few}, axes))
    return list(found.values())


def few_batches(ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Two rounds of the pipeline, or fewer if the batch has fewer; without a pipeline two micro-batches."""
    whole = {**TINY, **settings}
    enough = two_rounds(ranks, whole)
    piped = whole.get("pipeline_model_parallel_size", 1) > 1
    return {**settings, "global_batch_size": min(enough, whole["global_batch_size"]) if piped else enough}


def recorded(ranks: int, **settings: Any) -> ClusterRecording:
    torch.set_num_threads(1)
    config = parse_args(flags(**{**EVERYTHING, **settings, **TWO_STEPS}))
    return record_clusters({"a run": config}, ranks, pretrain_gpt())["a run"]


class Saved:
    """Checkpoints that runs resume from, each saved once for all layouts of the same training."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._folders: list[tuple[RunConfig, Path]] = []

    def before(self, config: RunConfig) -> Path:
        one = by_one_process(config)
        for known, folder in self._folders:
            if known == one:
                return folder
        folder = self._parent / str(len(self._folders))
        save_by_one_process(config, folder, pretrain_gpt())
        self._folders.append((one, folder))
        return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def runs(
    ranks: int, copies: list[int] | None = None, saved: Saved | None = None, **settings: Any
) -> dict[str, ClusterRecording]:
    """Records a new run and, with `saved`, a resumed one."""
    torch.set_num_threads(1)
    config = parse_args(flags(**{**EVERYTHING, **settings, **TWO_STEPS}))
    before = None if saved is None else saved.before(config)
    with TemporaryDirectory() as folder:
        return record_runs(config, ranks, pretrain_gpt(), Path(folder), before=before, copies=copies)


def findings(ranks: int, saved: Saved | None = None, **settings: Any) -> list[str]:
    found = runs(ranks, saved=saved, **settings)
    return [f"{name}: {line}" for name, run in found.items() for line in run.findings()]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__.rpartition(".")[2])
def test_no_layout_of_the_equivalence_suite_hangs(suite: Any, saved: Saved) -> None:
    found = {
        str(axes): findings(ranks, saved, **few_batches(ranks, {**family, **axes}))
        for ranks, family, axes in cases(suite)
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_layout_of_muon_hangs(saved: Saved) -> None:
    """All ranks are played: the replica that computes a matrix sends it to its peers, so replicas differ."""
    found = {}
    for ranks, some in test_optimizers.CASES.items():
        for settings in ({**family, **axes} for family, axes in some if family["optimizer"] == "muon"):
            layout = parse_args(flags(**settings)).parallel.layout(ranks)
            the_rest = [rank for rank in range(ranks) if representative(layout, rank) != rank]
            for name, run in runs(ranks, the_rest, saved, **few_batches(ranks, settings)).items():
                stuck = play({**run.programs, **run.copies}).stuck
                found[f"{name} of {ranks} ranks: {settings}"] = [*run.findings(), *stuck]
    assert {name: lines for name, lines in found.items() if lines} == {}


# Settings other than the layout that change the operations: features, and the values that arise.
TP2 = {"tensor_model_parallel_size": 2}
MOE = {"disable_bias_linear": True, "num_experts": 4, "expert_model_parallel_size": 2}
BETWEEN = {"save": "?", "non_persistent_save_interval": 1}
LOCAL = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "/proc/no/such/directory"}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp16, steps skipped": {**TP2, "fp16": True, "initial_loss_scale": 1e30},
    "fp16, steps made": {**TP2, "fp16": True, "initial_loss_scale": 1.0},
    "bf16, overlapped": {**TP2, "bf16": True, "overlap_grad_reduce": True},
    "dropout": {**TP2, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "recomputed": {**TP2, "recompute_granularity": "full", "recompute_method": "uniform", "hidden_dropout": 0.1},
    "recomputed in part": {**TP2, "recompute_granularity": "selective"},
    "weights alone": {**TP2, "no_save_optim": True, "no_save_rng": True, "finetune": True, "load": "?"},
    "saved in the background": {**TP2, "zero_stage": 1, "save_interval": 1, "async_save": True},
    "saved between saves": {**TP2, **BETWEEN, "non_persistent_ckpt_type": "global", "async_save": True},
    "saved on each machine": {**TP2, **BETWEEN, **LOCAL, "replication": True, "replication_jump": 2},
    "experts in fp16": {**MOE, "fp16": True, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "experts with a capacity": {**MOE, "moe_expert_capacity_factor": 1.0, "moe_shared_expert_intermediate_size": 32},
}


def test_no_variant_of_a_run_hangs(saved: Saved) -> None:
    found = {name: findings(4, saved, **few_batches(4, settings)) for name, settings in VARIANTS.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_skipped_step_asks_what_any_step_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    settle, outcomes = Optimizer.settle, []

    def noted(self: Optimizer, report: Any) -> Any:
        outcomes.append(settle(self, report))
        return outcomes[-1]

    monkeypatch.setattr(Optimizer, "settle", noted)
    skipped, made = (recorded(2, **VARIANTS[f"fp16, steps {how}"]).programs for how in ("skipped", "made"))
    assert [outcome.skipped for outcome in outcomes] == [True] * 4 + [False] * 4  # two steps of two ranks
    for rank in (0, 1):
        assert difference(skipped[rank], made[rank], int) is None


LOUD = {
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "timing_log_level": 2,
    "log_memory_interval": 1,
    "check_replicas_every": 1,
    "save_interval": 1,
}
INSTANCES = {"num_distributed_optimizer_instances": 2}
LATE = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
WORLDS: list[tuple[int, dict[str, Any]]] = [
    (8, {**TP2, "pipeline_model_parallel_size": 2, "num_layers": 4}),
    (8, {**MOE, **TP2, "sequence_parallel": True}),
    (8, {**MOE, "context_parallel_size": 2, "expert_model_parallel_size": 4}),
    (8, {"pipeline_model_parallel_size": 2, **MOE, "overlap_grad_reduce": True}),
    (8, {**MOE, **TP2, "sequence_parallel": True, **LATE}),
    (8, {**MOE, **LATE, **INSTANCES, "ddp_bucket_size": 8000}),
    (8, {"zero_stage": 3, **TP2, **INSTANCES}),
]


@pytest.mark.parametrize(("ranks", "axes"), WORLDS)
def test_every_rank_does_what_its_class_does(ranks: int, axes: dict[str, Any], tmp_path: Path) -> None:
    """All ranks of small worlds. A rank's place among the replicas changes nothing. Rank 0, which writes and logs
    everything, calls nothing more than the others of its class."""
    layout = parse_args(flags(**axes)).parallel.layout(ranks)
    the_rest = [rank for rank in range(ranks) if representative(layout, rank) != rank]
    files = {"metrics_jsonl": tmp_path / "metrics.jsonl", "data_table_path": tmp_path / "table"}
    for run in runs(ranks, the_rest, **few_batches(ranks, {**LOUD, **files, **axes})).values():
        assert {*run.programs, *run.copies} == set(range(ranks)) and len(run.copies) >= ranks // 2
        assert run.findings() == [] and play({**run.programs, **run.copies}).stuck == []


@pytest.mark.parametrize(
    ("ranks", "axes", "programs", "copies"),
    [
        (512, {**TP2, **MOE, "sequence_parallel": True, "expert_model_parallel_size": 4}, [*range(8)], [8, 511]),
        (
            1024,
            {**TP2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2},
            [0, 1, 2, 3, 512, 513],
            [4, 516, 1023],
        ),
        (512, {**TP2, **LATE, "num_distributed_optimizer_instances": 8}, [0, 1], [2, 3, 510, 511]),
        (4096, {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True}, [0, 2048], [1, 2049, 4095]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_thousands_of_ranks(ranks: int, axes: dict[str, Any], programs: list[int], copies: list[int]) -> None:
    """One rank stands for each class. The next replica's first rank at both ends of the pipeline and the last of all
    ranks do the same as theirs."""
    batch = {"num_layers": 4, "micro_batch_size": 1, "global_batch_size": ranks, "eval_iters": 0}
    cluster = recorded(ranks, **batch, **axes)
    assert cluster.findings() == [] and sorted(cluster.copies) == copies
    assert sorted(cluster.programs)[: len(programs)] == programs

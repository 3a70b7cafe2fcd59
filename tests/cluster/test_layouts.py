"""Every layout that the equivalence suite knows: all members of each communicator do the same in the same order, and no
rank waits for ever, from the start of a run over two steps and evaluations to its stop."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron.config import parse_args
from megatron.distributed import collectives, state
from megatron.distributed.state import Axis
from megatron.engine import Evaluation, evaluation
from megatron.layout import AXES, Layout
from megatron.training.order import recorder
from megatron.training.order.cluster import ClusterRecording, record_cluster
from tests.equivalence import test_context_parallel, test_data_parallel, test_model_parallel, test_moe
from tests.helpers.runs import TINY, flags, pretrain_gpt

Case = tuple[int, dict[str, Any], dict[str, Any]]
EVERYTHING = {"eval_interval": 2, "eval_iters": 1, "exit_signal_handler": True, "exit_duration_in_mins": 1000}
SUITES = (test_model_parallel, test_context_parallel, test_moe, test_data_parallel)


def cases(suite: Any) -> list[Case]:
    """(ranks, family, axes), each layout once: models differ in what they compute, not in whom they talk to."""
    found: dict[str, Case] = {}
    for ranks, some in suite.CASES.items():
        for family, axes in some:
            if ranks > 1:
                found.setdefault(f"{ranks} {axes} {'num_experts' in family}", (ranks, family, axes))
    return list(found.values())


def few_batches(ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Without a pipeline two micro-batches show all that more of them would."""
    names = ("tensor_model_parallel_size", "context_parallel_size")
    replicas = ranks // prod(settings.get(name, 1) for name in names)
    if settings.get("pipeline_model_parallel_size", 1) > 1:
        return settings
    return {**settings, "global_batch_size": 2 * replicas * settings.get("micro_batch_size", TINY["micro_batch_size"])}


def recorded(ranks: int, **settings: Any) -> ClusterRecording:
    torch.set_num_threads(1)
    return record_cluster(parse_args(flags(**{**EVERYTHING, **settings})), ranks, pretrain_gpt())


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__.rpartition(".")[2])
def test_no_layout_of_the_equivalence_suite_hangs(suite: Any) -> None:
    found = {
        str(axes): recorded(ranks, **few_batches(ranks, {**family, **axes})).findings()
        for ranks, family, axes in cases(suite)
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_thousand_ranks() -> None:
    """One rank of each class stands for the others; the next replica's first rank and the last of all do the same."""
    cluster = recorded(
        1024,
        num_layers=4,
        micro_batch_size=1,
        global_batch_size=1024,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        eval_iters=0,
    )
    assert cluster.findings() == [] and sorted(cluster.programs) == [0, 1, 2, 3, 512, 513, 514, 515]
    assert sorted(cluster.copies) == [4, 1023]


# What the proof is worth.

SETTINGS = {"num_layers": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "eval_iters": 0}


def test_planted_groups_made_in_another_order_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    build = state.ParallelState.build

    def reordered(*given: Any, **more: Any) -> state.ParallelState:
        with monkeypatch.context() as planted:
            if dist.get_rank() == 1:
                planted.setattr(state, "AXES", AXES[::-1])
            return build(*given, **more)

    monkeypatch.setattr(state.ParallelState, "build", staticmethod(reordered))
    first = recorded(8, **SETTINGS).findings()[0]
    by_count = first.startswith("groups are made in another order: ") and "rank 1" in first
    assert by_count or first.endswith("was made by rank 0 and not by rank 1"), first


def test_planted_a_collective_left_out_on_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = collectives.all_reduce
    calls: list[int] = []

    def left_out(tensor: torch.Tensor, axis: Axis, *rest: Any, **more: Any) -> torch.Tensor:
        if axis.name == "tp" and dist.get_rank() == 1:
            calls.append(1)
            if len(calls) == 3:
                return tensor
        return reduce(tensor, axis, *rest, **more)

    monkeypatch.setattr(collectives, "all_reduce", left_out)
    found = recorded(8, **SETTINGS).findings()
    assert any("of tp" in line and "on rank 0" in line and "on rank 1" in line for line in found), found


def test_planted_a_wait_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = collectives.Pending.wait

    def hasty(self: collectives.Pending) -> torch.Tensor:
        reduction = getattr(self.waiting, "args", ()) and self.waiting.args[0].axis == "dp_cp"  # type: ignore[attr-defined]
        return self.result() if reduction else wait(self)

    monkeypatch.setattr(collectives.Pending, "wait", hasty)
    found = recorded(4, **{**SETTINGS, "pipeline_model_parallel_size": 1}).findings()
    assert any(line.startswith("rank 0 never waits for all_reduce") and "dp" in line for line in found), found


def test_planted_a_rank_that_does_not_do_as_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = collectives.all_reduce

    def twice_on_the_last(tensor: torch.Tensor, axis: Axis, *rest: Any, **more: Any) -> torch.Tensor:
        if axis.name == "pp" and dist.get_rank() == 7:
            reduce(tensor, axis, *rest, **more)
        return reduce(tensor, axis, *rest, **more)

    monkeypatch.setattr(evaluation, "all_reduce", twice_on_the_last)
    found = recorded(8, **SETTINGS).findings()
    assert any(line.startswith("ranks of one class differ: operation") and "on rank 7" in line for line in found), found


def test_planted_two_ranks_that_ask_two_communicators_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each communicator sees the same operations on all members; it is the order between the two that hangs."""

    def both(self: Evaluation, totals: torch.Tensor) -> torch.Tensor:
        tp, pp = self.parallel.tp, self.parallel.pp
        for axis in (tp, pp) if tp.rank == pp.rank else (pp, tp):
            collectives.all_reduce(totals, axis)
        return totals

    monkeypatch.setattr(Evaluation, "_sum_over_ranks", both)
    found = recorded(4, **SETTINGS).findings()
    assert [line.split(" connects")[0].split(" waits")[0] for line in found] == ["rank 0", "rank 1", "rank 3", "rank 2"]


def test_foreign_callers_are_seen() -> None:
    """torch's fully_shard knows nothing of ours; it asks the same process groups."""
    with recorder.recorded(1, 4) as tape:
        parallel = state.ParallelState.build(Layout(4, tp=2), 1)
        mesh = DeviceMesh.from_group(parallel.dp.group, "cpu")
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(model, mesh=mesh)
        model.set_force_sum_reduction_for_comms(True)
        model(torch.ones(2, 4)).sum().backward()
        kinds = [(op.kind, tape.recording.groups[op.group].what) for op in tape.recording.ops]
    assert ("all_gather", "dp") in kinds and ("reduce_scatter", "dp") in kinds, kinds

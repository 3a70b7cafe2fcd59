"""Every planted fault in the order of operations is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron.checkpoint import found_step, reader, save
from megatron.checkpoint.background import Background
from megatron.data_parallel import BucketStore, fully_sharded
from megatron.data_parallel.buckets import Bucket
from megatron.distributed import collectives, parallel_state
from megatron.distributed.parallel_state import Axis
from megatron.engine import Engine, evaluation
from megatron.layout import AXES, Layout
from megatron.optimizer import matrices
from megatron.optimizer.matrices import WholeMatrices
from megatron.prove.order import recorder
from tests.cluster.test_layouts import LATE, findings, recorded

SETTINGS = {"num_layers": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "eval_iters": 0}


def test_planted_weights_gathered_in_another_order_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-1: the next forward pass triggers the gathers; rank 1 issues them in the other order."""
    publish = BucketStore.publish

    def other_way_round(self: BucketStore) -> None:
        buckets = self._buckets
        self._buckets = buckets[::-1] if dist.get_rank() == 1 else buckets
        publish(self)
        self._buckets = buckets

    monkeypatch.setattr(BucketStore, "publish", other_way_round)
    found = findings(4, **{**SETTINGS, "zero_stage": 1, "tensor_model_parallel_size": 1})
    assert any("of dp" in line and "rank 1" in line for line in found), found


def test_planted_weights_of_zero_3_that_one_rank_keeps_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    divide = fully_sharded.divide
    monkeypatch.setattr(
        fully_sharded,
        "divide",
        lambda units, keep_gathered, *rest: divide(units, keep_gathered or dist.get_rank() == 1, *rest),
    )
    found = recorded(2, num_layers=2, eval_iters=0, zero_stage=3).findings()
    assert any("of world" in line and "all_gather" in line and "on rank 1" in line for line in found), found


MUON = {"optimizer": "muon", "num_layers": 2, "tensor_model_parallel_size": 2, "eval_iters": 0}


def test_planted_matrices_brought_together_in_another_order_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    call = WholeMatrices.__call__

    def other_way_round(self: WholeMatrices, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return call(self, dict(reversed(pieces.items())) if dist.get_rank() == 1 else pieces)

    monkeypatch.setattr(WholeMatrices, "__call__", other_way_round)
    found = recorded(4, **MUON).findings()
    assert any("of tp" in line and "all_gather" in line and "on rank 1" in line for line in found), found


def test_planted_a_matrix_that_one_rank_takes_for_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks deal the matrices without communicating: one that deals differently waits for another's result."""
    deal = matrices.deal

    def shifted(those: Mapping[str, Any]) -> dict[str, Any]:
        owners = deal(those)
        return {name: (copy, 0 if dist.get_rank() == 1 else part) for name, (copy, part) in owners.items()}

    monkeypatch.setattr(matrices, "deal", shifted)
    found = recorded(4, **MUON).findings()
    both = ("of tp", "broadcast (from 1)", "broadcast (from 0)")
    assert any(all(part in line for part in both) for line in found), found


def test_planted_a_gather_of_weights_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "finish_gather", lambda self: setattr(self, "gathering", None))
    found = findings(4, **{**SETTINGS, **LATE, "tensor_model_parallel_size": 1})
    assert any("never waits for all_gather" in line and "dp" in line for line in found), found


def test_planted_groups_made_in_another_order_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    build = parallel_state.ParallelState.build

    def reordered(*given: Any, **more: Any) -> parallel_state.ParallelState:
        with monkeypatch.context() as planted:
            if dist.get_rank() == 1:
                planted.setattr(parallel_state, "AXES", AXES[::-1])
            return build(*given, **more)

    monkeypatch.setattr(parallel_state.ParallelState, "build", staticmethod(reordered))
    first = recorded(8, **SETTINGS).findings()[0]
    by_count = first.startswith("ranks create groups in different orders: ") and "rank 1" in first
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


def test_planted_a_collective_of_the_last_stages_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some ranks of the world are recorded: by default, none of rank 16's data-parallel peers."""
    train_step = Engine.train_step

    def asks_more(self: Engine, *given: Any, **more: Any) -> Any:
        if dist.get_rank() == 16:
            collectives.all_reduce(torch.ones(3), self.parallel.dp)
        return train_step(self, *given, **more)

    monkeypatch.setattr(Engine, "train_step", asks_more)
    batch = {"micro_batch_size": 1, "global_batch_size": 32}
    found = recorded(32, **{**SETTINGS, **batch, "num_layers": 2}).findings()
    assert any("operation" in line and "of 3 x" in line and "on rank 16" in line for line in found), found


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


def test_planted_a_gather_left_out_of_a_save_on_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = save.all_gather_json

    def left_out(value: Any, axis: Axis, kind: Any) -> list[Any]:
        return [value] if kind is int and axis.rank == 1 else gather(value, axis, kind)

    monkeypatch.setattr(save, "all_gather_json", left_out)
    found = findings(8, **SETTINGS)
    assert len(found) == 1 and found[0].startswith("a new run: operation ") and "world" in found[0], found


def test_planted_a_rank_that_does_not_ask_how_far_a_save_is(monkeypatch: pytest.MonkeyPatch) -> None:
    poll = Background.poll
    monkeypatch.setattr(Background, "poll", lambda self: None if dist.get_rank() == 1 else poll(self))
    found = findings(4, **{**SETTINGS, "pipeline_model_parallel_size": 1, "save_interval": 1, "async_save": True})
    assert len(found) >= 1 and found[0].startswith("a new run: operation ") and "world" in found[0], found
    assert "all_reduce (MAX) of 2 x float32" in found[0] and "rank 1" in found[0], found


def test_planted_a_rank_that_verifies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    share = found_step.share

    def alone(identify: Callable[[], str], world: Axis) -> tuple[int, int]:
        return (0, 1) if world.rank == 1 else share(identify, world)

    for room in (found_step, reader):
        monkeypatch.setattr(room, "share", alone)
    found = findings(8, **SETTINGS)
    assert len(found) == 1 and found[0].startswith("a resumed run: operation ") and "rank 1" in found[0], found


def test_planted_two_ranks_that_ask_two_communicators_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each communicator sees the same operations on all members; the order between the two hangs."""

    def both(self: Engine, totals: torch.Tensor) -> torch.Tensor:
        tp, pp = self.parallel.tp, self.parallel.pp
        for axis in (tp, pp) if tp.rank == pp.rank else (pp, tp):
            collectives.all_reduce(totals, axis)
        return totals

    monkeypatch.setattr(Engine, "_sum_over_ranks", both)
    found = recorded(4, **SETTINGS).findings()
    assert [line.split(" connects")[0].split(" waits")[0] for line in found] == ["rank 0", "rank 1", "rank 3", "rank 2"]


def test_foreign_callers_are_seen() -> None:
    """torch's fully_shard does not call this project's collectives, but it uses the same process groups."""
    with recorder.recorded(1, 4) as tape:
        parallel = parallel_state.ParallelState.build(Layout(4, tp=2), 1)
        mesh = DeviceMesh.from_group(parallel.dp.group, "cpu")
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(model, mesh=mesh)
        model.set_force_sum_reduction_for_comms(True)
        model(torch.ones(2, 4)).sum().backward()
        kinds = [(op.kind, tape.recording.groups[op.group].what) for op in tape.recording.ops]
    assert ("all_gather", "dp") in kinds and ("reduce_scatter", "dp") in kinds, kinds


def test_planted_tensors_that_nccl_does_not_take() -> None:
    """gloo accepts the first, and sends the second in memory order."""
    with recorder.recorded(1, 4):
        dp = parallel_state.ParallelState.build(Layout(4), 1).dp
        with pytest.raises(AssertionError, match=r"all_reduce over world: nccl does not take .* of torch\.int16"):
            collectives.all_reduce(torch.ones(4, dtype=torch.int16), dp)
        with pytest.raises(
            AssertionError, match=r"\[2, 3\] of torch\.float32 that is not contiguous \(strides \[1, 2\]"
        ):
            collectives.all_reduce(torch.ones(3, 2).t(), dp)
        with pytest.raises(AssertionError, match=r"send over world: .* not contiguous"):
            dist.send(torch.ones(3, 2).t(), 2, dp.group)

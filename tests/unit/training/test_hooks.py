"""User hooks: each moment comes at its time on every rank, and a hook may communicate with other ranks."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.distributed.messages import all_gather_json
from megatron.errors import NonFiniteError
from megatron.pretrain import Hook, pretrain
from megatron.training.initialize import Run
from megatron.training.metrics import EvalRecord, TrainRecord
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, pretrain_gpt, read_metrics
from tests.unit.engine.test_asynchronous import asynchronous


class Diary(Hook):
    """Records every moment."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        self.records: list[TrainRecord] = []

    def on_start(self, run: Run, model: nn.Module) -> None:
        assert isinstance(model, nn.Module)
        self.moments.append(f"start rank {run.launch.rank}")

    def before_iteration(self, iteration: int) -> None:
        self.moments.append(f"before {iteration}")

    def after_iteration(self, iteration: int) -> None:
        self.moments.append(f"after {iteration}")

    def on_step(self, record: TrainRecord, times: Mapping[str, float]) -> None:
        assert {"batch-generator", "forward-backward", "optimizer"} <= times.keys()
        self.moments.append(f"step {record.iteration}")
        self.records.append(record)

    def on_log(self, record: TrainRecord) -> None:
        self.moments.append(f"log {record.iteration}")

    def on_evaluate(self, record: EvalRecord) -> None:
        self.moments.append(f"{record.split} {record.iteration}")

    def on_end(self) -> None:
        self.moments.append("end")


SETTINGS: dict[str, Any] = {"train_iters": 4, "log_interval": 2, "eval_iters": 1, "eval_interval": 2}
MOMENTS = """start rank 0
before 1, step 1, after 1
before 2, step 2, log 2, after 2, valid 2
before 3, step 3, after 3
before 4, step 4, log 4, after 4, valid 4
end"""


def moments(text: str) -> list[str]:
    return text.replace("\n", ", ").split(", ")


def test_every_moment_comes_in_its_place() -> None:
    diary = Diary()
    with make_parts(flags(**SETTINGS), hooks=[diary])[1] as parts:
        parts.trainer.fit()
    assert diary.moments == moments(MOMENTS)


def test_a_step_is_told_of_when_its_outcome_is_known() -> None:
    """An accelerator reports it during the next iteration, or when something reads the state of the run."""
    diary = Diary()
    with asynchronous(), make_parts(flags(**SETTINGS), hooks=[diary])[1] as parts:
        parts.trainer.fit()
    assert diary.moments == moments("""start rank 0
before 1, after 1
before 2, step 1, after 2, step 2, log 2, valid 2
before 3, after 3
before 4, step 3, after 4, step 4, log 4, valid 4
end""")


def test_the_records_of_all_steps_are_those_of_a_run_that_logs_all(tmp_path: Path) -> None:
    """Independent of --log-interval; the norm of the parameters is computed only where it is logged."""
    found = []
    for interval in (1, 3):
        diary = Diary()
        with make_parts(flags(log_interval=interval, log_params_norm=True), hooks=[diary])[1] as parts:
            parts.trainer.fit()
        found.append(diary.records)
    for every, third in zip(*found, strict=True):
        assert (every.iteration, every.lm_loss, every.grad_norm) == (third.iteration, third.lm_loss, third.grad_norm)
        assert ("params_norm" not in third.reported) == (third.iteration % 3 != 0)
        assert third.reported.get("params_norm", every.reported["params_norm"]) == every.reported["params_norm"]


def test_an_iteration_without_a_step_tells_of_none() -> None:
    diary = Diary()
    with make_parts(flags(train_iters=2, iterations_to_skip=[1]), hooks=[diary])[1] as parts:
        parts.trainer.fit()
    assert diary.moments == moments("start rank 0, before 1, after 1, before 2, step 2, log 2, after 2, end")


def test_hooks_end_with_the_run_that_fails() -> None:
    class Stop(Hook):
        def after_iteration(self, iteration: int) -> None:
            if iteration == 2:
                raise RuntimeError("enough")

    diary = Diary()
    with pytest.raises(RuntimeError, match="enough"), make_parts(flags(), hooks=[Stop(), diary])[1] as parts:
        parts.trainer.fit()
    assert diary.moments[-2:] == ["log 2", "end"], "the hooks after one that fails do not hear of that moment"


def test_a_hook_can_end_the_run_by_an_error_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    class LossLimit(Hook):
        def on_step(self, record: TrainRecord, times: Mapping[str, float]) -> None:
            if record.iteration == 3:
                raise NonFiniteError("the loss is above the limit")

    script = pretrain_gpt()
    with pytest.raises(SystemExit) as stopped:
        pretrain(script.datasets_provider, script.model_provider, script.forward_step, flags(), hooks=[LossLimit()])
    assert stopped.value.code == NonFiniteError.exit_code
    said = capsys.readouterr()
    assert "error: the loss is above the limit" in said.err
    assert " iteration        2/" in said.out and " iteration        3/" not in said.out


class Agreed(Hook):
    """A user hook that communicates on every rank and writes on one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, run: Run, model: nn.Module) -> None:
        self.run, self.model = run, model

    def on_step(self, record: TrainRecord, times: Mapping[str, float]) -> None:
        held = sum(p.double().sum().item() for p in self.model.parameters())
        everyone = all_gather_json((held, record.lm_loss), self.run.parallel.world, tuple[float, float])
        if self.run.log.main:
            with self.path.open("a") as file:
                print(record.iteration, len(everyone), len(set(everyone)), file=file)


def train_with_hook(rank: int, size: int, path: Path) -> list[str]:
    torch.set_num_threads(1)
    diary = Diary()
    settings = {**SETTINGS, "metrics_jsonl": path.with_suffix(".jsonl")}
    with make_parts(flags(**settings), hooks=[Agreed(path), diary], rank=rank, world_size=size)[1] as parts:
        parts.trainer.fit()
    return diary.moments


def test_every_rank_has_the_hooks_and_they_may_use_collectives(tmp_path: Path) -> None:
    found = run_ranks(2, train_with_hook, 2, tmp_path / "agreed.txt")
    assert found == [moments(MOMENTS.replace("rank 0", f"rank {rank}")) for rank in range(2)]
    assert (tmp_path / "agreed.txt").read_text().splitlines() == [f"{number} 2 1" for number in (1, 2, 3, 4)]
    assert [record["iteration"] for record in read_metrics(tmp_path / "agreed.jsonl")] == [2, 4]


@pytest.mark.parametrize(("interval", "at"), [(0, []), (2, [1, 3, 5])])
def test_garbage_is_collected_by_hand(interval: int, at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(steps) + 1))
    collected: list[int] = []
    steps: list[int] = []

    class Count(Hook):
        def after_iteration(self, iteration: int) -> None:
            assert not gc.isenabled()
            steps.append(iteration)

    with make_parts(flags(manual_gc=True, manual_gc_interval=interval), hooks=[Count()])[1] as parts:
        parts.trainer.fit()
    assert collected == at and len(steps) == 6 and gc.isenabled()


# mistakes that must be seen


@pytest.mark.parametrize("wrong", ["the step is told of twice", "only logged steps are told of"])
def test_planted_mistakes_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.training_log import TrainingLog

    step = TrainingLog.step

    def planted(self: TrainingLog, iteration: Any, result: Any) -> None:
        if wrong == "the step is told of twice":
            step(self, iteration, result)
        if wrong == "only logged steps are told of" and iteration.number % 2:
            return
        step(self, iteration, result)

    monkeypatch.setattr(TrainingLog, "step", planted)
    with pytest.raises(AssertionError):
        test_every_moment_comes_in_its_place()

"""A training that cannot fit into its machine's memory is rejected before a weight is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config import ParallelConfig, parse_args
from megatron.distributed.launch import LaunchInfo
from megatron.training import fit, memory
from megatron.training.memory import predicted
from tests.helpers.runs import flags, make_run, pretrain_gpt, pretrain_here


def needed(ranks: int = 1, **settings: Any) -> list[float]:
    """Bytes of each rank, planned by one process."""
    config = parse_args(flags(**settings))
    run = make_run(replace(config, parallel=ParallelConfig()))
    run = replace(run, config=config, launch=LaunchInfo(world_size=ranks, local_world_size=ranks))
    return [rank.total for rank in predicted(run, pretrain_gpt().model_provider(run), range(ranks))]


def allow(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    (need,) = needed()
    monkeypatch.setattr(memory, "memory_limit", lambda: round(need * share))


@pytest.mark.parametrize(
    ("share", "code", "line"),
    [(0.99, 2, "error: --micro-batch-size 2: the rank here needs"), (1.05, 0, "warning: the rank here needs")],
)
def test_too_little_memory_is_rejected_and_hardly_enough_a_warning(
    share: float, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allow(monkeypatch, share)
    assert pretrain_here(flags(train_iters=1)) == code
    said = capsys.readouterr()
    assert line in said.out + said.err
    assert (" iteration " in said.out) == (code == 0) and ("--recompute-granularity full" in said.err) == (code != 0)


def test_enough_memory_is_not_mentioned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    allow(monkeypatch, 1.2)
    assert pretrain_here(flags(train_iters=1)) == 0
    said = capsys.readouterr()
    assert "of memory" not in said.out + said.err


def test_a_dry_run_says_what_all_ranks_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "memory_limit", lambda: 1000)
    assert pretrain_here([*flags(), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert (
        "activations " in said
        and "for the ranks together (estimate): does not fit into the 1000 B of this machine" in said
    )


def test_an_evaluation_needs_none_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 1)
    assert pretrain_here(flags(skip_train=True)) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        (LaunchInfo(rank=2, world_size=3, local_rank=0, local_world_size=2), 1),
        (LaunchInfo(rank=1, world_size=3, local_rank=1, local_world_size=2), 2),
        (LaunchInfo(rank=1, world_size=3, local_rank=1, local_world_size=3, local_is_said=False), 3),
        (LaunchInfo(world_size=3, local_world_size=3, local_is_said=False, master_addr="node1"), 1),
    ],
    ids=["last of uneven nodes", "first of uneven nodes", "on loopback", "anywhere"],
)
def test_the_ranks_of_this_machine_are_counted(launch: LaunchInfo, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_args(flags())
    run, counted = replace(make_run(config), launch=launch), list[int]()
    monkeypatch.setattr(memory, "shortage", lambda needs: counted.append(len(needs)))
    memory.with_memory_checked(pretrain_gpt().model_provider)(run)
    assert counted == [ranks]


def test_stages_are_counted_each_with_its_own() -> None:
    first, last = needed(2, num_layers=4, micro_batch_size=1, pipeline_model_parallel_size=2)
    (alone,) = needed(num_layers=4, micro_batch_size=1)
    assert last < alone and first < alone < first + last

"""Saves in the background on several ranks: whichever rank dies, at whichever storage operation, what the directory
then loads is the old step or the new one, bit for bit, and the next run saves there.

A few of the places are drawn with a fixed seed; `--every-crash` tries all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint import Background, Retention, RunHistory, Save, inspect_step, retention
from megatron.distributed.state import ParallelState
from megatron.errors import CheckpointError
from megatron.layout import Layout
from tests.faults.test_checkpoint import (
    FEW,
    KILLED,
    NEW,
    OLD,
    Hook,
    die_at,
    outcome,
    save_new,
    storage_hook,
)
from tests.unit.checkpoint.support import load, loaded_equals, make_params, save, write_tokenizer

LAYOUTS = {2: Layout(2), 4: Layout(4, tp=2)}
SAMPLE = {2: 4, 4: 2}
Point = tuple[int, int]
"""(the rank that dies, at which of its operations)"""


def save_of_ranks(rank: int, ranks: int, directory: Path, hook: Hook) -> None:
    parallel = ParallelState.build(LAYOUTS[ranks], rank)
    background, history = Background(parallel, torch.device("cpu"), later=False), RunHistory("several")
    load(directory, make_params(5, names=FEW), history=history)  # so that it goes on from the old step
    state = replace(NEW, replicas=dict.fromkeys(FEW, parallel.dp_cp))
    given = Save(directory, state, parallel, history, write_tokenizer, {})
    with storage_hook(hook):
        try:
            background.start(given, Retention())
            while background.busy:
                background.poll()
        except Exception:
            background.close()  # as a run that ends by an error
            raise
    history.close()


def exit_codes(ranks: int, body: Callable[[int], object], timeout: float = 30) -> list[int | None]:
    """Of processes that are each left to end by themselves: what one does that has lost another is of interest."""

    def run(rank: int, meeting: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks)
        try:
            body(rank)
        except Exception:
            os._exit(1)
        dist.barrier()
        dist.destroy_process_group()

    with TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=run, args=(rank, f"{folder}/meeting")) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def operations(ranks: int, template: Path, directory: Path) -> list[Point]:
    """Those of a save that nothing disturbs; of each rank in order."""

    def body(rank: int) -> None:
        seen: list[str] = []
        save_of_ranks(rank, ranks, directory / "saved", lambda operation, path: seen.append(operation))
        (directory / f"count-{rank}").write_text(str(len(seen)))

    shutil.copytree(template, directory / "saved")
    assert exit_codes(ranks, body) == [0] * ranks
    counts = [int((directory / f"count-{rank}").read_text()) for rank in range(ranks)]
    return [(rank, n + 1) for rank, count in enumerate(counts) for n in range(count)]


def after_crash(ranks: int, directory: Path, point: Point) -> str:
    def body(rank: int) -> None:
        save_of_ranks(rank, ranks, directory, die_at(point[1]) if rank == point[0] else _nothing)

    codes = exit_codes(ranks, body)
    assert codes[point[0]] == KILLED and -9 not in codes, (point, codes)
    found = outcome(directory)
    step = directory / ("iter_0000010" if found == "old" else "iter_0000020")
    assert inspect_step(step, deep=True)[1] == []
    if found == "old":
        save_new(directory)
        assert loaded_equals(directory, NEW) and not list(directory.glob(".tmp-*"))
    return found


def _nothing(operation: str, path: str) -> None:
    """The rank lives."""


def crash_at(points: list[Point], ranks: int, template: Path, work: Path) -> dict[Point, str]:
    found = {}
    for point in points:
        directory = work / "-".join(map(str, ("at", *point)))
        shutil.copytree(template, directory)
        found[point] = after_crash(ranks, directory, point)
        shutil.rmtree(directory)
    return found


def check(found: dict[Point, str]) -> None:
    """The first rank commits for all: at one of its operations the old step becomes the new one. Where another one dies
    while it writes, there is nothing to commit."""
    for rank in {rank for rank, _ in found}:
        outcomes = [found[point] for point in sorted(found) if point[0] == rank]
        assert outcomes == sorted(outcomes, key=("old", "new").index), (rank, outcomes)
        assert rank == 0 or set(outcomes) == {"old"}, (rank, outcomes)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_whichever_rank_dies_wherever(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    save(tmp_path / "template", OLD)
    points = operations(ranks, tmp_path / "template", tmp_path / "whole")
    assert {rank for rank, _ in points} == set(range(ranks)) and len(points) > 30
    every = request.config.getoption("--every-crash")
    chosen = points if every else random.Random(15).sample(points, SAMPLE[ranks])
    found = crash_at(chosen, ranks, tmp_path / "template", tmp_path)
    check(found)
    if every:
        assert {found[point] for point in points if point[0] == 0} == {"old", "new"}
        print(f"{ranks} ranks: {len(found)} crashes, of them {list(found.values()).count('new')} after the commit")


def test_planted_bug_room_is_made_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Save.prepare

    def prepare_and_delete(self: Save, need: int) -> None:
        prepare(self, need)
        retention.keep_only(self.directory, None)

    monkeypatch.setattr(Save, "prepare", prepare_and_delete)
    save(tmp_path / "template", OLD)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        crash_at([(1, 1)], 2, tmp_path / "template", tmp_path)

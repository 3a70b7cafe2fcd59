"""Background saves on several ranks: any rank may die at any storage operation. The directory then loads the old or the
new step, bit for bit, and the next run saves there.

A few places are drawn with a fixed seed; `--every-crash` tries all of them.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint import retention
from megatron.checkpoint.run_state import Retention
from megatron.checkpoint.save import Save
from megatron.errors import CheckpointError
from tests.faults.support import OLD, Point, assert_first_rank_commits, exit_codes, save_of_ranks, still_whole
from tests.faults.test_checkpoint import KILLED, die_at, storage_hook
from tests.unit.checkpoint.support import save

SAMPLE = {2: 4, 4: 2}


def operations(ranks: int, template: Path, directory: Path) -> list[Point]:
    """Operations of an undisturbed save, in order, rank by rank."""

    def body(rank: int) -> None:
        seen: list[str] = []
        hook = storage_hook(lambda operation, path: seen.append(operation))
        save_of_ranks(rank, ranks, directory / "saved", hook, background=True, kept=Retention())
        (directory / f"count-{rank}").write_text(str(len(seen)))

    shutil.copytree(template, directory / "saved")
    assert exit_codes(ranks, body) == [0] * ranks
    counts = [int((directory / f"count-{rank}").read_text()) for rank in range(ranks)]
    return [(rank, n + 1) for rank, count in enumerate(counts) for n in range(count)]


def after_crash(ranks: int, directory: Path, point: Point) -> str:
    def body(rank: int) -> None:
        hook = die_at(point[1]) if rank == point[0] else _nothing
        save_of_ranks(rank, ranks, directory, storage_hook(hook), background=True, kept=Retention())

    codes = exit_codes(ranks, body)
    assert codes[point[0]] == KILLED and -9 not in codes, (point, codes)
    return still_whole(directory)


def _nothing(operation: str, path: str) -> None:
    """Leaves the rank alive."""


def crash_at(points: list[Point], ranks: int, template: Path, work: Path) -> dict[Point, str]:
    found = {}
    for point in points:
        directory = work / "-".join(map(str, ("at", *point)))
        shutil.copytree(template, directory)
        found[point] = after_crash(ranks, directory, point)
        shutil.rmtree(directory)
    return found


@pytest.mark.parametrize("ranks", SAMPLE)
def test_whichever_rank_dies_wherever(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    save(tmp_path / "template", OLD)
    points = operations(ranks, tmp_path / "template", tmp_path / "whole")
    assert {rank for rank, _ in points} == set(range(ranks)) and len(points) > 30
    every = request.config.getoption("--every-crash")
    chosen = points if every else random.Random(15).sample(points, SAMPLE[ranks])
    found = crash_at(chosen, ranks, tmp_path / "template", tmp_path)
    assert_first_rank_commits(found)
    if every:
        assert {found[point] for point in points if point[0] == 0} == {"old", "new"}
        print(f"{ranks} ranks: {len(found)} crashes, of them {list(found.values()).count('new')} after the commit")


def test_planted_bug_room_is_made_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Save._prepare

    def prepare_and_delete(self: Save, need: int) -> None:
        prepare(self, need)
        retention.keep_only(self.directory, None)

    monkeypatch.setattr(Save, "_prepare", prepare_and_delete)
    save(tmp_path / "template", OLD)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        crash_at([(1, 1)], 2, tmp_path / "template", tmp_path)

"""A crash or an error at the system calls of a save, on 1, 2 and 4 ranks, in the foreground and in the background. The
directory then loads the old or the new step, bit for bit, and the next run saves there.

Unlike `test_checkpoint.py` this does not work in Python: `crash_shim.c`, loaded before the C library, also sees the
system calls of C code in Python and torch. A few places are drawn with a fixed seed; `--every-crash` tries all.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.checkpoint.run_state import RunHistory
from tests.faults.crash_server import Case, Way
from tests.faults.support import (
    FEW,
    OLD,
    assert_durable_before_commit,
    assert_first_rank_commits,
    still_whole,
)
from tests.helpers.runs import REPOSITORY
from tests.unit.checkpoint.support import make_state, save

RANKS = (1, 2, 4)
SAMPLE = {1: 6, 2: 4, 4: 3}
KILLED = -9
BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])


class Operation(NamedTuple):
    kind: str
    bytes: int
    path: str


class Place(NamedTuple):
    rank: int
    operation: int
    """Index of the operation on that rank, from 1."""
    way: Way


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]

    def exit_codes(self, case: Case) -> list[int]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(case.line())
        stdin.flush()
        return json.loads(stdout.readline())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Process that forks saving ranks, with the shim loaded before its C library."""
    if sys.platform != "linux":
        pytest.skip("what stands before the C library is Linux's")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on the PATH")
    shim = tmp_path_factory.mktemp("shim") / "crash_shim.so"
    source = Path(__file__).with_name("crash_shim.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", shim, "-ldl"], check=True)
    command, environment = [sys.executable, "-m", "tests.faults.crash_server"], os.environ | {"LD_PRELOAD": str(shim)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes) as process:  # type: ignore[call-overload]
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two old steps; retention deletes the older one once the new one is committed."""
    directory, history = tmp_path_factory.mktemp("template").resolve() / "saved", RunHistory("first")
    save(directory, make_state(8, names=FEW), history)
    save(directory, OLD, history)
    history.close()
    return directory


def watch(server: Server, template: Path, case: Case) -> list[list[Operation]]:
    """Each rank's operations in an undisturbed save, whose result stays in place."""
    shutil.copytree(template, case.directory)
    assert server.exit_codes(case) == [0] * case.ranks
    return [operations(case, rank) for rank in range(case.ranks)]


def operations(case: Case, rank: int) -> list[Operation]:
    lines = (line.split(" ", 2) for line in case.log(rank).read_text().splitlines())
    return [Operation(kind, int(size), path) for kind, size, path in lines]


def disturb(server: Server, template: Path, whole: Case, place: Place) -> str:
    """Returns whether the old or the new step loads after the fault; also checks how the save ends."""
    directory = f"{whole.directory}-{place.rank}-{place.operation}-{place.way.name}"
    case = replace(whole, directory=directory, rank=place.rank, operation=place.operation, way=place.way)
    shutil.copytree(template, directory)
    codes = server.exit_codes(case)
    found = still_whole(Path(directory))
    shutil.rmtree(directory)
    if place.way in (Way.KILL, Way.HALF):
        assert codes[place.rank] == KILLED and KILLED not in codes[: place.rank] + codes[place.rank + 1 :], codes
        assert len(operations(case, place.rank)) == place.operation  # it ended there, and was not waited for in vain
    else:  # an error on all ranks, or on none: a folder that another rank has made, an old step that cannot be deleted
        assert set(codes) == {1} or (set(codes) == {0} and found == "new"), codes
    return found


def places(ranks: Sequence[list[Operation]]) -> list[Place]:
    return [
        Place(rank, number, way)
        for rank, done in enumerate(ranks)
        for number, operation in enumerate(done, 1)
        for way in Way
        if way != Way.WATCH and (way != Way.HALF or operation.bytes > 1)
    ]


def disturb_all(server: Server, template: Path, whole: Case, chosen: Sequence[Place]) -> dict[Place, str]:
    """Tries all places, then fails with all that went wrong."""
    found, wrong = {}, []
    for place in chosen:
        try:
            found[place] = disturb(server, template, whole, place)
        except Exception as error:
            wrong.append(f"{place}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    return found


@BACKGROUND
@pytest.mark.parametrize("ranks", RANKS)
def test_whatever_happens_at_whichever_operation(
    ranks: int, background: bool, server: Server, template: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = Case(str(tmp_path.resolve() / "at"), ranks, background)
    all_places = places(watch(server, template, whole))
    every = request.config.getoption("--every-crash")
    chosen = all_places if every else random.Random(15).sample(all_places, SAMPLE[ranks])
    found = disturb_all(server, template, whole, chosen)
    for way in (Way.KILL, Way.HALF):
        assert_first_rank_commits({place[:2]: step for place, step in found.items() if place.way == way})
    if every:
        assert {step for place, step in found.items() if place.rank == 0} == {"old", "new"}
        counts = Counter((place.way.name, step) for place, step in found.items())
        print(
            f"{ranks} ranks, {'async' if background else 'sync'}: {len(found)} places, {dict(sorted(counts.items()))}"
        )


def names(done: list[Operation], case: Case) -> list[tuple[str, str]]:
    """Names without the parts that differ between saves."""
    return [(kind, re.sub(r"\d+-[0-9a-f]{8}", "", path.removeprefix(case.directory))) for kind, _, path in done]


@BACKGROUND
def test_every_operation_is_seen(background: bool, server: Server, template: Path, tmp_path: Path) -> None:
    """File sizes prove it: all their bytes came from operations that were seen."""
    first, again = (Case(str(tmp_path.resolve() / name), 2, background) for name in ("first", "again"))
    seen = watch(server, template, first)
    assert_durable_before_commit([(kind, path) for kind, _, path in seen[0]], Path(first.directory))
    assert [names(done, again) for done in watch(server, template, again)] == [names(done, first) for done in seen]
    done = [operation for rank in seen for operation in rank]
    kinds = Counter(operation.kind for operation in done)
    assert kinds.keys() == {"open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "truncate"}, kinds
    step = Path(first.directory) / "iter_0000020"
    written = Counter[str]()
    for operation in done:
        written[operation.path.replace(f"/.tmp-{step.name}.several/", f"/{step.name}/")] += operation.bytes
    assert {path: written[str(path)] for path in step.rglob("*")} == {
        path: path.stat().st_size if path.is_file() else 0 for path in step.rglob("*")
    }


def test_planted_bug_a_step_has_its_name_before_it_is_written(server: Server, template: Path, tmp_path: Path) -> None:
    whole = Case(str(tmp_path.resolve() / "at"), 1, background=False, bug="named_before_it_is_written")
    (done,) = watch(server, template, whole)
    manifest = next(n for n, operation in enumerate(done, 1) if operation.path.endswith("manifest.json"))
    with pytest.raises(AssertionError, match="iter_0000020"):
        disturb_all(server, template, whole, [Place(0, manifest, Way.KILL)])


def test_planted_bug_nothing_is_synced(server: Server, template: Path, tmp_path: Path) -> None:
    whole = Case(str(tmp_path.resolve() / "at"), 1, background=False, bug="nothing_is_synced")
    (done,) = watch(server, template, whole)
    with pytest.raises(AssertionError, match="fsync"):
        assert_durable_before_commit([(kind, path) for kind, _, path in done], Path(whole.directory))

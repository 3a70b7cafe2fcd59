"""Crashes, full disks and power loss at every storage operation of a save leave the old step or the new one.

A forked process ends with `os._exit`, which runs no cleanup, just before its k-th storage operation; a write ends in
the middle. The page cache survives the process, so this does not test fsync: the order of writes, fsyncs and renames is
recorded and checked separately.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.run_state import RunHistory
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.storage import HashingFile
from megatron.checkpoint.verify import inspect_step
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError, StorageError
from megatron.layout import Layout
from tests.faults.support import (
    FEW,
    NEW,
    OLD,
    assert_durable_before_commit,
    outcome,
    save_new,
    step_loaded,
)
from tests.helpers.distributed import RankFailed, run_ranks
from tests.unit.checkpoint.support import load, loaded_equals, make_params, make_state, save

SMALL_WRITE = 200  # torch's padding and its markers are not crash points of their own
KILLED = 86
Hook = Callable[[str, str], None]


@contextmanager
def storage_hook(hook: Hook) -> Iterator[None]:
    """Calls `hook(operation, path)` before every operation that changes the disk."""
    names = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "remove", "ftruncate")
    originals: dict[str, Any] = {name: getattr(os, name) for name in names}
    original_open, original_write = builtins.open, HashingFile.write

    def wrap(name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            subject = args[0]
            place = str(Path(f"/proc/self/fd/{subject}").readlink()) if isinstance(subject, int) else str(subject)
            hook(name, place)
            return originals[name](*args, **kwargs)

        return wrapped

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if any(letter in mode for letter in "wxa+"):
            hook("open", str(file))
        return original_open(file, mode, *args, **kwargs)

    def writing(self: HashingFile, data: Any) -> int:
        view = memoryview(data).cast("B")
        half = len(view) // 2
        if len(view) < SMALL_WRITE:
            return original_write(self, data)
        hook("write", self._file.name)
        self._file.write(view[:half])
        self._file.flush()
        hook("write-half", self._file.name)  # a torn write
        self._file.seek(-half, os.SEEK_CUR)
        return original_write(self, data)

    try:
        for name in names:
            setattr(os, name, wrap(name))
        builtins.open = opening  # type: ignore[assignment]
        HashingFile.write = writing  # type: ignore[method-assign]
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
        builtins.open = original_open
        HashingFile.write = original_write  # type: ignore[method-assign]


def in_child(work: Callable[[], None]) -> int:
    """Exit code of a fork that runs `work`."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(count: int) -> Hook:
    seen = 0

    def hook(operation: str, path: str) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            os._exit(KILLED)

    return hook


def fail_at(count: int, number: int, only: str | None = None) -> Hook:
    seen = 0

    def hook(operation: str, path: str) -> None:
        nonlocal seen
        if only is None or operation == only:
            seen += 1
            if seen == count:
                raise OSError(number, os.strerror(number), path)

    return hook


def crash_everywhere(template: Path, work: Path, action: Callable[[Path], None]) -> list[str]:
    """Kills `action` on a fresh copy of `template` at each storage operation; returns the outcomes in order."""
    outcomes = []
    for count in range(1, 500):
        directory = work / f"at-{count}"
        shutil.copytree(template, directory)

        def killed(directory: Path = directory, count: int = count) -> None:
            with storage_hook(die_at(count)):
                action(directory)

        code = in_child(killed)
        assert code in (0, KILLED), f"operation {count}: exit code {code}"
        outcomes.append(outcome(directory))
        if code == 0:
            return outcomes
        assert in_child(lambda d=directory: save_new(d)) == 0, f"the same step cannot be saved after operation {count}"
        assert loaded_equals(directory, NEW)
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".tmp-") or path.suffix == ".tmp"]
        shutil.rmtree(directory)
    raise AssertionError("the save never came to its end")


def one_switch(outcomes: list[str]) -> bool:
    """Checks that outcomes are old up to some operation, and new from then on."""
    first_new = outcomes.index("new")
    return first_new > 0 and set(outcomes[first_new:]) == {"new"}


def test_kill_or_torn_write_at_every_operation_of_a_save(tmp_path: Path) -> None:
    save(tmp_path / "template", OLD)
    outcomes = crash_everywhere(tmp_path / "template", tmp_path, save_new)
    assert len(outcomes) > 25 and one_switch(outcomes)


def test_kill_while_rewinding_past_newer_steps(tmp_path: Path) -> None:
    """The tracker names step 30, step 10 is loaded on purpose, and 20 is saved: 30 must never return."""
    history = RunHistory("first")
    save(tmp_path / "template", OLD, history)
    save(tmp_path / "template", make_state(30, seed=3, names=FEW), history)
    history.close()

    def rewind(directory: Path) -> None:
        history = RunHistory("second")
        load(directory, make_params(5, names=FEW), step=10, history=history)
        save(directory, NEW, history)

    seen = set()
    for count in range(1, 500):
        directory = tmp_path / f"at-{count}"
        shutil.copytree(tmp_path / "template", directory)

        def killed(directory: Path = directory, count: int = count) -> None:
            with storage_hook(die_at(count)):
                rewind(directory)

        code = in_child(killed)
        step = step_loaded(directory)
        seen.add(step)
        set_aside = (directory / "abandoned-iter_0000030").exists()
        assert step in (10, 20) if set_aside else step == 30
        shutil.rmtree(directory)
        if code == 0:
            break
    assert seen == {30, 10, 20}


def test_kill_during_retention(tmp_path: Path) -> None:
    """A half-deleted step is never loaded, and the next save finishes the deletion."""
    history = RunHistory("first")
    for step in (6, 8):
        save(tmp_path / "template", make_state(step, names=FEW), history)
    save(tmp_path / "template", OLD, history)
    history.close()
    outcomes = crash_everywhere(tmp_path / "template", tmp_path, lambda d: save_new(d, retain_last=2))
    assert one_switch(outcomes)


def test_a_crash_between_rename_and_tracker_does_not_stop_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, OLD)
    save(tmp_path, NEW, run_id="other")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    save_new(tmp_path)
    assert loaded_equals(tmp_path, NEW)
    assert (tmp_path / "abandoned-iter_0000020").is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_operation_leaves_the_old_step_and_a_clear_message(tmp_path: Path, number: int) -> None:
    save(tmp_path / "template", OLD)
    refused = 0
    for count in range(1, 500):
        directory = tmp_path / f"at-{count}"
        shutil.copytree(tmp_path / "template", directory)
        history = RunHistory("second")
        load(directory, make_params(5, names=FEW), history=history)
        try:
            with storage_hook(fail_at(count, number)):
                save(directory, NEW, history)
        except StorageError as error:
            refused += 1
            assert os.strerror(number) in str(error) and str(directory) in str(error)
        else:
            history.close()
            break
        found = outcome(directory)
        leftovers = [path.name for path in directory.iterdir() if path.name.startswith(".tmp-iter")]
        assert not leftovers or found == "new", (count, leftovers)
        save(directory, NEW, history)  # space was made: the same run goes on
        assert loaded_equals(directory, NEW)
        history.close()
        shutil.rmtree(directory)
    assert refused > 20


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, OLD)
    monkeypatch.setattr("megatron.checkpoint.storage.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match=r"1000 bytes are free"):
        save_new(tmp_path)
    assert outcome(tmp_path) == "old"


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        save(tmp_path / "file" / "ckpts", OLD)


def test_everything_is_durable_before_the_commit(tmp_path: Path) -> None:
    """Power loss destroys what is not synced."""
    log: list[tuple[str, str]] = []
    save(tmp_path, OLD)
    history = RunHistory("second")
    load(tmp_path, make_params(5, names=FEW), history=history)
    with storage_hook(lambda operation, path: log.append((operation, path))):
        save(tmp_path, NEW, history)
    history.close()
    assert_durable_before_commit(log, tmp_path)


# ---------------------------------------------------------------- two ranks


def two_rank_save(directory: Path, hook_of: Callable[[int], Hook]) -> None:
    def body(rank: int) -> str:
        parallel = ParallelState.build(Layout(2), rank)
        history = RunHistory("two")
        with storage_hook(hook_of(rank)):
            return save_checkpoint(directory, NEW, parallel=parallel, save_tokenizer=None, history=history).path.name

    run_ranks(2, body, timeout=10)


def test_an_error_on_the_writing_rank_reaches_the_other(tmp_path: Path) -> None:
    save(tmp_path, OLD)

    def body(rank: int) -> str:
        parallel = ParallelState.build(Layout(2, tp=2), rank)
        hook = fail_at(1, errno.ENOSPC, only="write") if rank == 1 else lambda operation, path: None
        try:
            with storage_hook(hook):
                save_checkpoint(tmp_path, NEW, parallel=parallel, save_tokenizer=None, history=RunHistory("two"))
        except StorageError as error:
            return str(error)
        return "saved"

    messages = run_ranks(2, body)
    assert all("No space left on device" in message for message in messages)
    assert "(on rank 1)" in messages[0]
    assert outcome(tmp_path) == "old"
    assert not list(tmp_path.glob(".tmp-iter*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_commits_nothing(tmp_path: Path, rank: int) -> None:
    save(tmp_path, OLD)
    with pytest.raises(RankFailed):
        two_rank_save(tmp_path, lambda r: die_at(6) if r == rank == 0 else _die_at_once(r == rank == 1))
    assert outcome(tmp_path) == "old"
    save_new(tmp_path)
    assert outcome(tmp_path) == "new"


def _die_at_once(victim: bool) -> Hook:
    if victim:  # rank 1 writes nothing under data parallelism: it dies before the ranks agree
        os._exit(KILLED)
    return lambda operation, path: None


def test_every_data_parallel_rank_gets_its_own_random_state_back(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, bool]:
        parallel = ParallelState.build(Layout(2), rank)
        state = make_state(names=FEW, rng={"stream": rank + 40})
        save_checkpoint(tmp_path, state, parallel=parallel, save_tokenizer=None, history=RunHistory("two"))
        from megatron.checkpoint.found_step import find_checkpoint
        from megatron.checkpoint.load import load_checkpoint

        params = make_params(seed=8, names=FEW)
        found = find_checkpoint(tmp_path, parallel=parallel)
        assert found is not None
        loaded = load_checkpoint(found, parallel=parallel, params=params)
        assert loaded.rng is not None
        return loaded.rng["stream"], bool(
            (params["final_layernorm.weight"][1] == state.params["final_layernorm.weight"][1]).all()
        )

    assert run_ranks(2, body) == [(40, True), (41, True)]
    assert inspect_step(tmp_path / "iter_0000010", deep=True)[1] == []


def test_damage_seen_by_one_rank_makes_all_fall_back(tmp_path: Path) -> None:
    history = RunHistory("first")
    save(tmp_path, OLD, history)
    save(tmp_path, NEW, history)
    history.close()

    def body(rank: int) -> int:
        import megatron.checkpoint.found_step as module
        from megatron.checkpoint.found_step import find_checkpoint
        from megatron.checkpoint.load import load_checkpoint
        from megatron.checkpoint.verify import DamagedCheckpointError

        original = module.verified_manifest

        def seen_by_rank_1(directory: Path, **options: Any) -> Any:
            if rank == 1 and directory.name == "iter_0000020":
                raise DamagedCheckpointError("a bit flipped on the way to rank 1")
            return original(directory, **options)

        module.verified_manifest = seen_by_rank_1
        parallel = ParallelState.build(Layout(2), rank)
        found = find_checkpoint(tmp_path, parallel=parallel)
        assert found is not None
        return load_checkpoint(found, parallel=parallel, params=make_params(3, names=FEW), load_rng=False).step

    assert run_ranks(2, body) == [10, 10]


def test_loading_never_writes(tmp_path: Path) -> None:
    save(tmp_path, OLD)
    touched: list[str] = []
    with storage_hook(lambda operation, path: touched.append(path)):
        step_loaded(tmp_path)
        with pytest.raises(CheckpointError):
            load(tmp_path, step=11)
    assert touched == []

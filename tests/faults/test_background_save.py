"""Background saves: a crash or an error at any storage operation leaves the old or the new step. Training does not
change what was copied. A step is called saved only once it is on disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron.checkpoint.background import Background, HostMemory
from megatron.checkpoint.content import RankContent
from megatron.checkpoint.run_state import Retention, RunHistory, SavedInfo, TrainState
from megatron.checkpoint.save import Save
from megatron.checkpoint.verify import inspect_step
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import NonFiniteError, StorageError
from megatron.layout import Layout
from tests.faults.support import FEW, NEW, OLD, outcome
from tests.faults.test_checkpoint import crash_everywhere, fail_at, one_switch, storage_hook
from tests.helpers.distributed import run_ranks
from tests.unit.checkpoint.support import (
    VOCABULARY,
    load,
    loaded_equals,
    make_params,
    make_state,
    one_process,
    save,
    write_tokenizer,
)

CPU = torch.device("cpu")
OTHER = make_state(20, seed=9, names=FEW)


def save_of(directory: Path, state: TrainState, history: RunHistory, parallel: ParallelState | None = None) -> Save:
    return Save(directory, state, parallel or one_process(), history, write_tokenizer, {})


def resumed(directory: Path) -> RunHistory:
    history = RunHistory("second")
    load(directory, make_params(5, names=FEW), history=history)
    return history


def save_in_background(directory: Path) -> None:
    history, background = resumed(directory), Background(one_process(), CPU, later=False)
    assert background.start(save_of(directory, NEW, history), Retention()) is None
    info = background.finish()
    assert info is not None and info.step == 20
    history.close()


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Blocks writes until the event is set."""
    go, write = Event(), Save.write

    def waiting(self: Save, content: RankContent, stop: Event | None = None) -> None:
        assert go.wait(60)
        write(self, content, stop)

    monkeypatch.setattr(Save, "write", waiting)
    try:
        yield go
    finally:
        go.set()


# ---------------------------------------------------------------- crashes and errors


def test_kill_or_torn_write_at_every_operation(tmp_path: Path) -> None:
    save(tmp_path / "template", OLD)
    outcomes = crash_everywhere(tmp_path / "template", tmp_path, save_in_background)
    assert len(outcomes) > 25 and one_switch(outcomes)


def test_an_error_at_any_operation_is_raised_at_the_next_boundary(tmp_path: Path) -> None:
    save(tmp_path / "template", OLD)
    refused = 0
    for count in range(1, 500):
        directory = tmp_path / f"at-{count}"
        shutil.copytree(tmp_path / "template", directory)
        history, background = resumed(directory), Background(one_process(), CPU, later=False)
        with storage_hook(fail_at(count, errno.ENOSPC)):
            try:
                background.start(save_of(directory, NEW, history), Retention())
                while background.busy:
                    background.poll()
            except StorageError as error:
                refused += 1
                assert "No space left on device" in str(error) and str(directory) in str(error)
            else:
                history.close()
                break
        found = outcome(directory)
        leftovers = [path.name for path in directory.iterdir() if path.name.startswith(".tmp-iter")]
        assert not leftovers or found == "new", (count, leftovers)
        assert not background.busy
        background.start(save_of(directory, NEW, history), Retention())  # space was made: the same run goes on
        background.finish()
        assert loaded_equals(directory, NEW)
        history.close()
        shutil.rmtree(directory)
    assert refused > 20


def test_numbers_that_are_not_finite_are_refused_as_ever(tmp_path: Path) -> None:
    state = make_state(20, names=FEW)
    with torch.no_grad():
        state.params["final_layernorm.weight"][1][0] = float("nan")
    background = Background(one_process(), CPU, later=False)
    background.start(save_of(tmp_path, state, RunHistory("a")), Retention())
    with pytest.raises(NonFiniteError, match=r"final_layernorm\.weight holds NaN"):
        background.finish()
    assert not list(tmp_path.glob("*iter*"))


def test_a_run_that_ends_by_an_error_commits_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, OLD)
    history, background = resumed(tmp_path), Background(one_process(), CPU, later=False)
    with held_back(monkeypatch) as go:
        background.start(save_of(tmp_path, NEW, history), Retention())
        flight = background._flight
        assert flight is not None
        flight.stop.set()
        go.set()
        background.close()
        assert flight.task.failed
    history.close()
    assert outcome(tmp_path) == "old"
    save(tmp_path, NEW, run_id="third")
    assert outcome(tmp_path) == "new" and not list(tmp_path.glob(".tmp*"))


def failing(rank: int, directory: Path, victim: int) -> str:
    parallel = ParallelState.build(Layout(2), rank)
    background, history = Background(parallel, CPU, later=True), RunHistory("two")
    state = replace(NEW, replicas=dict.fromkeys(FEW, parallel.dp_cp))
    hook = fail_at(1, errno.EIO, only="write") if rank == victim else lambda operation, path: None
    with storage_hook(hook):
        background.start(save_of(directory, state, history, parallel), Retention())
        for boundary in range(10_000):
            try:
                background.poll()
            except StorageError as error:
                return f"{boundary} {str(error).replace(f' (on rank {victim})', '')}"
    return "no error"


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_on_one_rank_stops_all_at_the_same_boundary(tmp_path: Path, victim: int) -> None:
    save(tmp_path, OLD)
    first, second = run_ranks(2, failing, tmp_path, victim)
    assert first == second and "Input/output error" in first
    assert outcome(tmp_path) == "old" and not list(tmp_path.glob(".tmp-iter*"))


# ---------------------------------------------------------------- what was copied


def state_that_trains() -> tuple[TrainState, TrainState]:
    """A state, and a copy of its present values."""
    return make_state(20, seed=2, names=FEW), make_state(20, seed=2, names=FEW)


@torch.no_grad()
def train_on(state: TrainState) -> None:
    for _, tensor in state.params.values():
        tensor.add_(1)
    for kinds in (state.optimizer or {}).values():
        for _, tensor in kinds.values():
            tensor.mul_(3)


def check_copy(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, as_it_was = state_that_trains()
    history, background = RunHistory("a"), Background(one_process(), CPU, later=False)
    with held_back(monkeypatch) as go:
        background.start(save_of(directory, live, history), Retention())
        train_on(live)
        go.set()
        background.finish()
    history.close()
    assert loaded_equals(directory, as_it_was)


def test_training_does_not_change_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_copy(tmp_path, monkeypatch)


def test_planted_bug_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "copy", lambda self, tensor: tensor.detach())
    with pytest.raises(AssertionError):
        check_copy(tmp_path, monkeypatch)


def test_the_memory_of_one_save_is_that_of_the_next(tmp_path: Path) -> None:
    history, background = RunHistory("a"), Background(one_process(), CPU, later=False)
    states = [make_state(step, seed=step, names=FEW) for step in (10, 20, 30)]
    blocks: list[list[Any]] = []
    for state in states:
        background.start(save_of(tmp_path, state, history), Retention())
        background.finish()
        blocks.append([id(block) for block in background._memory._blocks])
    history.close()
    assert blocks[0] == blocks[1] == blocks[2] and len(blocks[0]) == 1
    for state in states:
        assert loaded_equals(tmp_path, state, step=state.iteration)


def test_pieces_of_host_memory_do_not_overlap() -> None:
    memory = HostMemory(pinned=False)
    for _ in range(2):
        memory.begin()
        tensors = [torch.randn(shape).to(dtype) for shape in ((), (0, 3), (7,), (5, 3)) for dtype in
                   (torch.float32, torch.bfloat16, torch.float64)]  # fmt: skip
        tensors += [torch.randn(3, 4).t(), torch.arange(5), torch.tensor(True), torch.randn(9 * 2**21)]
        copies = [memory.copy(tensor) for tensor in tensors]
        assert all(
            torch.equal(copy, tensor) and copy.is_contiguous() for copy, tensor in zip(copies, tensors, strict=True)
        )
        sizes = [copy.untyped_storage().nbytes() for copy in copies]
        assert sizes == [tensor.numel() * tensor.element_size() for tensor in tensors]


def test_no_copy_is_read_before_it_has_arrived(tmp_path: Path) -> None:
    """Simulates an accelerator, whose copies arrive after they were begun; one tensor is a padded embedding."""
    arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begun(tensor: torch.Tensor) -> torch.Tensor:
        arrivals.append((torch.full_like(tensor, torch.nan).contiguous(), tensor.detach().clone()))
        return arrivals[-1][0]

    words = "embedding.word_embeddings.weight"
    spec, table = make_params()[words]
    state = make_state(params={**make_params(), words: (spec, table[:VOCABULARY])})
    history = RunHistory("a")
    wanted, found = (save_of(tmp_path, state, history).content(*how) for how in ((), (begun,)))
    history.close()
    for copied, tensor in arrivals:
        copied.copy_(tensor)
    ours, theirs = ([t for t in tree_leaves(one.files) if isinstance(t, torch.Tensor)] for one in (found, wanted))
    assert len(ours) > len(arrivals) > 20 and all(map(torch.equal, ours, theirs))


# ---------------------------------------------------------------- steps that are called saved


def test_a_step_is_told_once_it_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, background = RunHistory("a"), Background(one_process(), CPU, later=False)
    with held_back(monkeypatch) as go:
        background.start(save_of(tmp_path, NEW, history), Retention())
        for _ in range(3):
            assert background.poll() is None and not (tmp_path / "iter_0000020").exists()
        go.set()
        info: SavedInfo | None = None
        while info is None:
            info = background.poll()
    assert inspect_step(tmp_path / "iter_0000020", deep=True)[1] == [] and info.blocked is not None
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20"
    already = background.start(save_of(tmp_path, OTHER, history), Retention())
    assert already is not None and already.already_there
    history.close()
    assert os.listdir(tmp_path / "iter_0000020").count("manifest.json") == 1

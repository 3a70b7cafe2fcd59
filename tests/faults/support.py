"""Shared parts of the crash tests: an old step, the new step whose save crashes, ranks that end by themselves, and what
must hold of the directory afterwards."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.background import Background
from megatron.checkpoint.run_state import Retention, RunHistory
from megatron.checkpoint.save import Save, save_now
from megatron.checkpoint.verify import inspect_step
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from tests.unit.checkpoint.support import load, loaded_equals, make_params, make_state, save, write_tokenizer

FEW = ("embedding.word_embeddings.weight", "final_layernorm.weight")  # a save of few operations
OLD, NEW = make_state(10, seed=1, names=FEW), make_state(20, seed=2, names=FEW)
LAYOUTS = {1: Layout(1), 2: Layout(2), 4: Layout(4, tp=2)}
Point = tuple[int, int]
"""(rank that dies, index of its operation)."""


# ---------------------------------------------------------------- saves


def save_new(directory: Path, prepare: Callable[[RunHistory], object] | None = None, **options: Any) -> None:
    history = RunHistory("second")
    load(directory, make_params(5, names=FEW), history=history)
    if prepare is not None:
        prepare(history)
    save(directory, NEW, history, **options)
    history.close()


def save_of_ranks(
    rank: int,
    ranks: int,
    directory: Path,
    watched: AbstractContextManager[object],
    *,
    background: bool,
    kept: Retention,
) -> None:
    """Saves the new step on one of several ranks; only the save itself runs within `watched`."""
    parallel = ParallelState.build(LAYOUTS[ranks], rank)
    history = RunHistory("several")
    load(directory, make_params(5, names=FEW), history=history)  # resumes from the old step
    state = replace(NEW, replicas=dict.fromkeys(FEW, parallel.dp_cp))
    given = Save(directory, state, parallel, history, write_tokenizer, {})
    with watched:
        if background:
            save_in_background(given, kept)
        else:
            save_now(given, kept)
    history.close()


def save_in_background(given: Save, kept: Retention) -> None:
    background = Background(given.parallel, torch.device("cpu"), later=False)
    try:
        background.start(given, kept)
        while background.busy:
            background.poll()
    except Exception:
        background.close()  # as a run that ends by an error
        raise


def exit_codes(ranks: int, body: Callable[[int], object], timeout: float = 30) -> list[int | None]:
    """Exit codes of processes that each end by themselves, including those that lost a peer."""

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


# ---------------------------------------------------------------- what must hold


def outcome(directory: Path) -> str:
    """Returns which state the directory loads, bit for bit; anything else fails the test."""
    is_new = step_loaded(directory) == 20
    assert loaded_equals(directory, NEW if is_new else OLD)
    return "new" if is_new else "old"


def step_loaded(directory: Path) -> int:
    loaded = load(directory, make_params(5, names=FEW))
    assert loaded is not None
    return loaded.step


def still_whole(directory: Path) -> str:
    """Returns what the directory loads after an interrupted save of the new step. Checks that every step is complete
    and that the new step can be saved again."""
    found = outcome(directory)
    for step in directory.glob("iter_*"):
        assert inspect_step(step, deep=True)[1] == [], step.name
    save_new(directory)
    assert loaded_equals(directory, NEW) and not list(directory.glob(".tmp-*"))
    return found


def assert_first_rank_commits(found: Mapping[Point, str]) -> None:
    """One operation of rank 0 commits for all: there the old step becomes the new one. The death of another rank during
    its writes commits nothing."""
    for rank in {rank for rank, _ in found}:
        outcomes = [found[point] for point in sorted(found) if point[0] == rank]
        assert outcomes == sorted(outcomes, key=("old", "new").index), (rank, outcomes)
        assert rank == 0 or set(outcomes) == {"old"}, (rank, outcomes)


def assert_durable_before_commit(log: list[tuple[str, str]], directory: Path) -> None:
    """Checks the order: each file is synced after its last write, each directory after its last new name, then comes
    the rename. `log`: (operation, path)."""

    def last(operation: str, end: str) -> int:
        found = [i for i, (op, path) in enumerate(log) if op == operation and path.endswith(end)]
        assert found, (operation, end)
        return found[-1]

    commit = next(i for i, (op, path) in enumerate(log) if op == "rename" and ".tmp-iter_0000020" in path)
    temporary = log[commit][1]
    for name in ("mp_rank_00/model_optim_rng.pt", "manifest.json"):
        assert last("write", name) < last("fsync", f"{temporary}/{name}") < commit
    assert last("open", "manifest.json") > last("fsync", "model_optim_rng.pt")
    assert last("open", "model_optim_rng.pt") < last("fsync", f"{temporary}/mp_rank_00") < commit
    assert last("fsync", f"{temporary}/manifest.json") < last("fsync", temporary) < commit
    assert last("fsync", f"{temporary}/tokenizer/tokenizer.json") < commit
    after = log[commit:]
    parent = next(i for i, entry in enumerate(after) if entry == ("fsync", str(directory)))
    renamed = (i for i, (op, path) in enumerate(after) if op in ("rename", "replace") and "latest_checkpointed" in path)
    tracker = next(renamed)
    assert parent < tracker
    assert after[tracker + 1] == ("fsync", str(directory))

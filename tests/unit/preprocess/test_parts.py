"""Reader, encoder and pool, each tested separately."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.progress import ProgressDisplay
from megatron.tokenizer import TokenizerSettings
from megatron.utils import pool
from megatron.utils.pool import WorkerDiedError, WorkerPool

# ---------------------------------------------------------------- pool


Note = Callable[[Any], None]


def double(task: int, note: Note) -> int:
    time.sleep(0.01 * (task % 3))
    note(task)
    return 2 * task


def die_at_seven(task: int, note: Note) -> int:
    if task == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def fail_at_seven(task: int, note: Note) -> int:
    if task == 7:
        raise ValueError("seven")
    return task


def run_out_at_seven(task: int, note: Note) -> int:
    if task == 7:
        raise MemoryError
    return task


def process_ids(workers: WorkerPool[int, int]) -> list[int]:
    return [worker.process.pid for worker in workers._workers if worker.process.pid is not None]


def answers_of(workers: WorkerPool[int, int], tasks: Iterator[int], noted: Note = lambda note: None) -> list[int]:
    return list(workers.map(tasks, described=lambda task: f"task {task}", noted=noted))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_task_is_answered_by_forked_and_fresh_workers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_METHOD", method)
    notes: list[int] = []
    with WorkerPool[int, int](double, 2) as workers:
        assert sorted(answers_of(workers, iter(range(20)), notes.append)) == [2 * i for i in range(20)]
    assert sorted(notes) == list(range(20))


def test_tasks_are_taken_no_further_ahead_than_allowed() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for i in range(50):
            taken += 1
            yield i

    with WorkerPool[int, int](double, 3) as workers:
        for done, _ in enumerate(workers.map(tasks(), described=str, noted=lambda note: None)):
            assert taken - done <= pool.AHEAD * 3 + 4


def test_the_task_of_a_dead_worker_is_known_at_once() -> None:
    with pytest.raises(WorkerDiedError) as death, WorkerPool[int, int](die_at_seven, 3) as workers:
        answers_of(workers, iter(range(100)))
    assert (death.value.task, death.value.exit_code) == ("task 7", -signal.SIGKILL)


@pytest.mark.parametrize("given", [0, 3])
def test_a_worker_that_dies_idle_is_noticed_while_the_next_task_is_slow_to_come(given: int) -> None:
    never = threading.Event()

    def tasks() -> Iterator[int]:
        yield from range(given)
        threading.Timer(0.1, os.kill, (process_ids(workers)[1], signal.SIGKILL)).start()
        never.wait(30)

    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as death, WorkerPool[int, int](double, 2) as workers:
        answers_of(workers, tasks())
    assert death.value.task is None and death.value.exit_code == -signal.SIGKILL
    assert time.monotonic() - started < 10
    never.set()


def test_what_reading_the_input_raises_is_raised() -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise ConfigError("damaged")

    with pytest.raises(ConfigError, match="damaged"), WorkerPool[int, int](double, 2) as workers:
        answers_of(workers, tasks())


def test_a_worker_out_of_memory_counts_as_dead() -> None:
    with pytest.raises(WorkerDiedError) as death, WorkerPool[int, int](run_out_at_seven, 2) as workers:
        answers_of(workers, iter(range(100)))
    assert (death.value.task, death.value.exit_code) == ("task 7", pool.OUT_OF_MEMORY)


def test_our_own_fault_in_a_worker_shows_its_traceback() -> None:
    with pytest.raises(AssertionError, match="ValueError: seven"), WorkerPool[int, int](fail_at_seven, 2) as workers:
        answers_of(workers, iter(range(100)))


def answer_with_process(task: int, note: Note) -> int:
    return os.getpid()


def wait_until_gone(process: int) -> None:
    deadline = time.monotonic() + 30
    stat = Path(f"/proc/{process}/stat")
    while stat.exists() and ") Z" not in stat.read_text():  # ended, and not yet asked for its exit code
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.01)


def test_a_killed_worker_is_gone_and_its_signal_reported() -> None:
    with WorkerPool[int, int](answer_with_process, 1) as workers:
        assert answers_of(workers, iter([1])) == process_ids(workers)
        (worker,) = process_ids(workers)
        workers.kill()
        wait_until_gone(worker)
    with pytest.raises(WorkerDiedError) as death, WorkerPool[int, int](answer_with_process, 1) as workers:
        for worker in workers.map(iter(range(9)), described=str, noted=lambda note: None):
            os.kill(worker, signal.SIGTERM)
    assert death.value.exit_code == -signal.SIGTERM


def test_workers_that_cannot_be_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start = WorkerPool._start
    started: list[Any] = []

    def limited(self: WorkerPool[int, int], handler: object) -> object:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start(self, handler))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(WorkerPool, "_start", limited)
    with pytest.raises(ConfigError, match="--workers 9: only 2 processes could be started"):
        WorkerPool[int, int](double, 9)
    assert all(not worker.process.is_alive() for worker in started)


# ---------------------------------------------------------------- the rest


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressDisplay(1000, 1) as progress:
        progress.update(documents=3, tokens=7, read=500, position=500)
    shown = terminal.getvalue()
    assert "50%" in shown and "Processed" not in shown


def test_an_unknown_size_gives_no_eta(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(0, 1) as progress:
        progress.update(documents=3, tokens=7, read=500, position=500)
    said = capsys.readouterr().err
    assert "Processed 3 documents" in said and "ETA" not in said


def test_outputs_are_named_as_megatron_names_them() -> None:
    given = PreprocessSettings(inputs=("in",), output_prefix="dir/my", tokenizer=TokenizerSettings())
    assert given.outputs == ["dir/my_text_document"]
    assert replace(given, split_sentences=True).outputs == ["dir/my_text_sentence"]

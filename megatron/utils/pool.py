"""Runs tasks in a pool of worker processes, notices the death of a worker at once and knows the task it had.

Each worker has its own pipe and one task at a time. Pools of the standard library hang when a worker is killed
(`multiprocessing.Pool`), or cannot tell which task it had (`concurrent.futures`). Workers end when the parent dies.

On Linux the workers are forked before the parent opens an output or starts a thread, and share its loaded tokenizer. So
32 of them start in a fraction of a second and use little memory. Elsewhere they are spawned.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, BinaryIO, Generic, TypeVar

from megatron.errors import ConfigError
from megatron.utils.process import die_with, how_to_continue
from megatron.utils.read_ahead import ReadAhead

Task = TypeVar("Task")
Answer = TypeVar("Answer")

START_METHOD = "fork" if sys.platform == "linux" else "spawn"
READ_AHEAD = 2  # tasks prefetched
AHEAD = 2  # tasks in flight beyond the oldest unanswered one, per worker
STOP_SECONDS = 2.0
TOLD_EVERY = 30.0  # seconds without any answer, after which stopped workers are named
OUT_OF_MEMORY = 137  # the exit code after the kernel's OOM kill
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_LARGE_BYTES = 2 << 20


class WorkerDiedError(Exception):
    """A worker died without answering `task` (None: it was idle)."""

    def __init__(self, task: Any, exit_code: int | None) -> None:
        super().__init__(task, exit_code)
        self.task, self.exit_code = task, exit_code


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    number: int = -1  # of its task; -1: idle
    task: Any = None  # its description


class WorkerPool(Generic[Task, Answer]):
    """Calls `handler` in a worker with a task and a function that sends notes to the parent. Forked workers close the
    `private` files, because a lock lasts as long as any process holds its file open."""

    def __init__(
        self, handler: Callable[[Task, Callable[[Any], None]], Answer], workers: int, private: Sequence[BinaryIO] = ()
    ) -> None:
        self._context = multiprocessing.get_context(START_METHOD)
        self._private = private
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(self._start(handler))
        except OSError as error:
            started = len(self._workers)
            self.kill()
            raise ConfigError(
                f"--workers {workers}: only {started} processes could be started ({error.strerror}); use fewer"
            ) from None

    def _start(self, handler: Callable[[Task, Callable[[Any], None]], Answer]) -> _Worker:
        ours, theirs = self._context.Pipe(duplex=True)
        # A forked worker inherits the parent's ends of all pipes; kept open, they would hide the parent's death.
        inherited: list[Connection | BinaryIO] = []
        if START_METHOD == "fork":
            inherited = [*(worker.connection for worker in self._workers), ours, *self._private]
        arguments = (theirs, inherited, handler, os.getpid())
        process = self._context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def map(
        self, tasks: Iterator[Task], *, described: Callable[[Task], Any], noted: Callable[[Any], None]
    ) -> Iterator[Answer]:
        """Yields answers as they come. At most AHEAD tasks per worker are in flight beyond the oldest unanswered one.

        Workers are watched even while the next task is slow to come. Notes of workers go to `noted`. If a worker dies,
        a WorkerDiedError has the description of its task, from `described`.
        """
        source = ReadAhead(tasks, depth=READ_AHEAD)
        exhausted, given = False, 0
        open_tasks: set[int] = set()
        try:
            while not exhausted or open_tasks:
                idle = next((worker for worker in self._workers if worker.number < 0), None)
                room = given - min(open_tasks, default=given) < AHEAD * len(self._workers)
                waited: list[Any] = [worker.connection for worker in self._workers]
                if idle is not None and room and not exhausted:
                    waited.append(source.ready)
                ready = wait(waited, TOLD_EVERY)
                if not ready:
                    self._tell_of_stopped()
                if source.ready in ready and idle is not None:
                    task = next(source, None)
                    if task is None:
                        exhausted = True
                    else:
                        _give(idle, given, task, described)
                        open_tasks.add(given)
                        given += 1
                    del task
                for worker in [worker for worker in self._workers if worker.connection in ready]:
                    number = worker.number
                    kind, content = _receive(worker)
                    if kind == "note":
                        noted(content)
                        continue
                    open_tasks.discard(number)
                    yield content
        finally:
            source.stop(0.0)

    def _tell_of_stopped(self) -> None:
        """Logs how to continue stopped workers. They are not killed, because they resume where they were."""
        for worker in self._workers:
            if worker.number >= 0 and worker.process.pid and (line := how_to_continue(worker.process.pid)):
                logging.getLogger(__name__).warning(line)

    def __enter__(self) -> "WorkerPool[Task, Answer]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def stop(self) -> None:
        """Lets idle workers end, and kills those that do not."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            _until_closed(worker.connection)
            worker.connection.close()
        self._workers = []


def _until_closed(connection: Connection) -> None:
    """Waits until every process has closed the other end."""
    try:
        while True:
            connection.recv_bytes()
    except (EOFError, OSError):
        return


def _give(worker: _Worker, number: int, task: Any, described: Callable[[Any], Any]) -> None:
    worker.number, worker.task = number, described(task)
    try:
        worker.connection.send(task)
    except OSError:
        raise _death_of(worker) from None


def _receive(worker: _Worker) -> tuple[str, Any]:
    try:
        kind, content = worker.connection.recv()
    except (EOFError, OSError):
        raise _death_of(worker) from None
    if kind == "failure":
        raise AssertionError(f"a worker failed on {worker.task!r:.200}:\n{content}")
    if kind == "answer":
        worker.task, worker.number = None, -1
    return kind, content


def _death_of(worker: _Worker) -> WorkerDiedError:
    worker.process.join(STOP_SECONDS)
    return WorkerDiedError(worker.task, worker.process.exitcode)


def _serve(
    connection: Connection,
    inherited: Sequence[Connection | BinaryIO],
    handler: Callable[[Any, Callable[[Any], None]], Any],
    parent: int,
) -> None:
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, which a terminal sends to all
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)  # elsewhere than on Linux it ends after its task
    _return_large_blocks()
    # One core per worker. `tokenizers` would start a thread per core in each worker, and only this variable prevents
    # it; it is set for this process alone.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _answer_all(connection, handler)


def _return_large_blocks() -> None:
    """Makes glibc return large freed blocks to the system at once, so that a hash table that doubles does not leave its
    smaller copies in the heap."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _answer_all(connection: Connection, handler: Callable[[Any, Callable[[Any], None]], Any]) -> None:
    try:
        while True:
            task = connection.recv()
            message: tuple[str, Any]
            try:
                message = ("answer", handler(task, lambda note: connection.send(("note", note))))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)  # at once, because any cleanup may need memory
            except BrokenPipeError:
                return  # the parent is gone
            except Exception:
                message = ("failure", traceback.format_exc())
            del task
            connection.send(message)
    except (EOFError, OSError):
        return  # the parent is gone

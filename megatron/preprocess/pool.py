"""Worker processes that answer tasks.

Each worker has its own pipe and one task at a time, so that a worker that dies (killed, out of memory) is noticed
at once, at work or idle, and the very task it held is known; `multiprocessing.Pool` waits for ever, and
`concurrent.futures` cannot say which task it was. Workers end by themselves when the parent is gone.

On Linux the workers are forked, before the parent opens an output or starts a thread, and share the tokenizer it
has loaded: 32 of them cost a fraction of a second and next to no memory. Elsewhere they are started afresh.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from megatron.errors import ConfigError
from megatron.preprocess.ahead import ReadAhead
from megatron.preprocess.generations import Growth, die_with, in_generations

Task = TypeVar("Task")
Answer = TypeVar("Answer")

AHEAD = 2  # tasks handed out ahead of the oldest unanswered one, per worker
STOP_SECONDS = 2.0
OUT_OF_MEMORY = 137  # as if the kernel had killed it
# A worker that has grown beyond both is replaced by a fresh one.
ROOM_BYTES = 9 << 20
GROWTH_BYTES = 3 << 20


class WorkerDiedError(Exception):
    """A worker ended without an answer to `task` (None: while it waited for one)."""

    def __init__(self, task: Any, exit_code: int | None) -> None:
        super().__init__(task, exit_code)
        self.task, self.exit_code = task, exit_code


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    number: int = -1  # of the task it holds; -1: it waits for one
    task: Any = None  # what is kept of it


class WorkerPool(Generic[Task, Answer]):
    """`handler` is called in a worker with a task and a function that sends notes to the parent. `private` are open
    files of the parent that a forked worker must not hold: a lock ends with the last process that does."""

    def __init__(
        self,
        handler: Callable[[Task, Callable[[Any], None]], Answer],
        workers: int,
        *,
        method: str | None = None,
        private: Sequence[Closable] = (),
    ) -> None:
        method = method or ("fork" if sys.platform == "linux" else "spawn")
        self._context = multiprocessing.get_context(method)
        self._forked = method == "fork"
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
        # A forked worker inherits the parent's ends of all pipes; holding them it would hide the parent's death.
        inherited: list[Closable] = []
        if self._forked:
            inherited = [*(worker.connection for worker in self._workers), ours, *self._private]
        arguments = (theirs, inherited, handler, os.getpid(), self._forked)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def map(
        self,
        tasks: Iterator[Task],
        *,
        described: Callable[[Task], Any],
        noted: Callable[[Any], None],
    ) -> Iterator[Answer]:
        """Answers as they come, tasks started no further than AHEAD per worker beyond the oldest unanswered one.

        While the next task is slow to come the workers are watched all the same. `noted` is given what a worker says
        between a task and its answer; `described` is what is kept of a task, for the message if its worker dies.
        """
        source = ReadAhead(tasks)
        exhausted, given = False, 0
        open_tasks: set[int] = set()
        try:
            while not exhausted or open_tasks:
                idle = next((worker for worker in self._workers if worker.number < 0), None)
                room = given - min(open_tasks, default=given) < AHEAD * len(self._workers)
                waited: list[Any] = [worker.connection for worker in self._workers]
                if idle is not None and room and not exhausted:
                    waited.append(source.ready)
                ready = wait(waited)
                if source.ready in ready and idle is not None:
                    task = source.take()
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
            source.close()

    def __enter__(self) -> WorkerPool[Task, Answer]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def stop(self) -> None:
        """Let idle workers leave; end those that do not."""
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
    """Until nobody holds the other end: what works for a process ends just after it."""
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
    inherited: Sequence[Closable],
    handler: Callable[[Any, Callable[[Any], None]], Any],
    parent: int,
    forked: bool,
) -> None:
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a terminal sends Ctrl-C to all
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
    # One worker is one core. `tokenizers` would start a thread for each core in each worker, has no call to prevent
    # it, and reads this variable; it is set for this process alone.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if forked:
        in_generations(lambda: _answer(connection, handler, Growth(ROOM_BYTES, GROWTH_BYTES)))
    _answer(connection, handler, None)


def _answer(
    connection: Connection, handler: Callable[[Any, Callable[[Any], None]], Any], growth: Growth | None
) -> bool:
    """True when this process has grown too large, False when there is nothing more to do."""
    try:
        while True:
            task = connection.recv()
            message: tuple[str, Any]
            try:
                message = ("answer", handler(task, lambda note: connection.send(("note", note))))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)  # at once: whatever else happens here may want memory
            except OSError as error:
                if error.errno == errno.EPIPE:
                    return False
                message = ("failure", traceback.format_exc())
            except Exception:
                message = ("failure", traceback.format_exc())
            del task
            connection.send(message)
            if growth is not None and growth.too_large():
                return True
    except (EOFError, OSError):
        return False  # the parent is gone

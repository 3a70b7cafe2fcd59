"""Worker processes that answer tasks, with the answers in the order of the tasks.

Each worker has its own pipe and one task at a time, so that a worker that dies (killed, out of memory) is noticed
at once and the very task it held is known; `multiprocessing.Pool` waits for ever, and `concurrent.futures` cannot
say which task it was. Workers end by themselves when the parent is gone.

On Linux the workers are forked, before the parent opens an output or starts a thread, and share the tokenizer it
has loaded: 32 of them cost a fraction of a second and next to no memory. Elsewhere they are started afresh.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from megatron.errors import ConfigError

Task = TypeVar("Task")
Answer = TypeVar("Answer")

AHEAD = 2  # tasks handed out ahead of the oldest unanswered one, per worker
STOP_SECONDS = 2.0
OUT_OF_MEMORY = 137  # as if the kernel had killed it


class WorkerDiedError(Exception):
    """A worker ended without an answer to `task`."""

    def __init__(self, task: Any, exit_code: int | None) -> None:
        super().__init__(task, exit_code)
        self.task, self.exit_code = task, exit_code


@dataclass(eq=False)
class _Worker(Generic[Task]):
    process: BaseProcess
    connection: Connection
    number: int = -1  # of the task it holds
    task: Task | None = None


class WorkerPool(Generic[Task, Answer]):
    def __init__(self, handler: Callable[[Task], Answer], workers: int, *, method: str | None = None) -> None:
        method = method or ("fork" if sys.platform == "linux" else "spawn")
        self._context = multiprocessing.get_context(method)
        self._forked = method == "fork"
        self._workers: list[_Worker[Task]] = []
        try:
            for _ in range(workers):
                self._workers.append(self._start(handler))
        except OSError as error:
            started = len(self._workers)
            self.kill()
            raise ConfigError(
                f"--workers {workers}: only {started} processes could be started ({error.strerror}); use fewer"
            ) from None

    def _start(self, handler: Callable[[Task], Answer]) -> _Worker[Task]:
        ours, theirs = self._context.Pipe(duplex=True)
        # A forked worker inherits the parent's ends of all pipes; holding them it would hide the parent's death.
        inherited = [worker.connection for worker in self._workers] + [ours] if self._forked else []
        process = self._context.Process(target=_serve, args=(theirs, inherited, handler), daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def map_ordered(
        self, tasks: Iterable[Task], *, cost: Callable[[Task], int], cost_in_flight: int
    ) -> Iterator[Answer]:
        """Answers in the order of the tasks, reading ahead no further than the two limits allow."""
        source = enumerate(tasks)
        idle = deque(self._workers)
        busy: dict[Connection, _Worker[Task]] = {}
        answers: dict[int, Answer] = {}
        costs: dict[int, int] = {}
        next_out, exhausted = 0, False
        while True:
            while idle and not exhausted and self._room(costs, cost_in_flight):
                number, task = next(source, (-1, None))
                if task is None:
                    exhausted = True
                    break
                costs[number] = cost(task)
                worker = idle.popleft()
                _give(worker, number, task)
                busy[worker.connection] = worker
            if busy:
                # Collect without waiting while there is something to hand on; the caller's work overlaps theirs.
                for ready in wait(list(busy), timeout=0 if next_out in answers else None):
                    worker = busy.pop(cast(Connection, ready))
                    answers[worker.number] = _receive(worker)
                    idle.append(worker)
                if idle and not exhausted and self._room(costs, cost_in_flight):
                    continue
            if next_out in answers:
                del costs[next_out]
                next_out += 1
                yield answers.pop(next_out - 1)
            elif not busy:
                return

    def _room(self, costs: dict[int, int], cost_in_flight: int) -> bool:
        return not costs or (len(costs) < AHEAD * len(self._workers) and sum(costs.values()) < cost_in_flight)

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
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []


def _give(worker: _Worker[Task], number: int, task: Task) -> None:
    worker.number, worker.task = number, task
    try:
        worker.connection.send(task)
    except OSError:
        raise _death_of(worker) from None


def _receive(worker: _Worker[Any]) -> Any:
    try:
        answer, failure = worker.connection.recv()
    except (EOFError, OSError):
        raise _death_of(worker) from None
    if failure is not None:
        raise AssertionError(f"a worker failed on {worker.task!r:.200}:\n{failure}")
    worker.task = None
    return answer


def _death_of(worker: _Worker[Any]) -> WorkerDiedError:
    worker.process.join(STOP_SECONDS)
    return WorkerDiedError(worker.task, worker.process.exitcode)


def _serve(connection: Connection, inherited: list[Connection], handler: Callable[[Any], Any]) -> None:
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a terminal sends Ctrl-C to all
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # One worker is one core. `tokenizers` would start a thread for each core in each worker, has no call to prevent
    # it, and reads this variable; it is set for this process alone.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        message: tuple[Any, str | None]
        try:
            message = (handler(task), None)
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        except Exception:
            message = (None, traceback.format_exc())
        try:
            connection.send(message)
        except OSError:
            return

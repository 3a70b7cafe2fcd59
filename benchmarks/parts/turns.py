"""Contenders that take turns in separate processes, so that settings and crashes of one do not affect another.

Machines drift within minutes; ratios of successive times do not.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

Turn = Callable[[int], dict[str, Any]]
"""Makes this many steps and returns the measurements."""


class NotInstalledError(Exception):
    """Raised if a contender's library or compiler is missing."""


def serve(prepare: Callable[[], Turn], link: Connection) -> None:
    """Runs in a contender's process. Reports that it is ready, then makes a turn for each number of steps received."""
    try:
        turn = prepare()
        link.send(("ready", {}))
        while steps := link.recv():
            link.send(("done", turn(steps)))
    except EOFError:  # the parent is gone
        return
    except NotInstalledError as error:
        link.send(("left out", str(error)))
    except BaseException as error:
        said = str(error).strip().splitlines()
        link.send(("left out", f"{type(error).__name__}: {said[0] if said else 'no message'}"))
        raise


class Contenders:
    """Contenders that still run. `left_out` has the names of the others, with the reasons."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self._links: dict[str, Connection] = {}
        self._processes: dict[str, BaseProcess] = {}
        self._context = multiprocessing.get_context("spawn")

    @property
    def names(self) -> list[str]:
        return list(self._links)

    def start(self, name: str, prepare: Callable[[], Turn]) -> None:
        """Starts a contender. `answer` returns when it is ready."""
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(prepare, there), name=name)
        process.start()
        there.close()  # so that waiting for a contender ends if its process dies
        self._links[name], self._processes[name] = here, process

    def ask(self, name: str, steps: int) -> None:
        with suppress(OSError):  # a dead contender; `answer` reports it
            self._links[name].send(steps)

    def answer(self, name: str, seconds: float | None = None) -> dict[str, Any] | None:
        """Returns a contender's measurements; None if it is left out from now on."""
        link, process = self._links[name], self._processes[name]
        seconds = None if seconds is None else max(0.0, seconds)
        kind, said = self._received(link, process, seconds)
        if kind != "left out":
            return dict(said)
        self.left_out[name] = said
        self._links.pop(name).close()
        process.kill()
        return None

    def _received(self, link: Connection, process: BaseProcess, seconds: float | None) -> tuple[str, Any]:
        try:
            if link.poll(seconds):
                kind, said = link.recv()
                return kind, said
            return "left out", f"no answer within the remaining {seconds:.0f} s"
        except (EOFError, OSError):
            process.join(5)
            return "left out", f"its process ended with exit code {process.exitcode}"

    def turn(self, name: str, steps: int, seconds: float | None = None) -> dict[str, Any] | None:
        self.ask(name, steps)
        return self.answer(name, seconds)

    def close(self, patience: float = 5) -> None:
        """Ends the processes, after at most `patience` seconds."""
        until = time.monotonic() + patience
        for name in self.names:
            self.ask(name, 0)
        for process in self._processes.values():
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
        self._links.clear()


def race(prepare: Mapping[str, Callable[[], Turn]], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Runs contenders in turns; all must finish. Returns every contender's "seconds" per round, without the uncounted
    first round, and its last measurements."""
    contenders = Contenders()
    times: dict[str, list[float]] = {name: [] for name in prepare}
    last: dict[str, Any] = {}
    try:
        for name, make in prepare.items():
            contenders.start(name, make)
            if contenders.answer(name) is None:
                raise SystemExit(f"{name}: {contenders.left_out[name]}")
        for number in range(-1, rounds):
            for name in rotated(list(prepare), number):
                measured = contenders.turn(name, 1)
                if measured is None:
                    raise SystemExit(f"{name}: {contenders.left_out[name]}")
                last[name] = measured
                if number >= 0:
                    times[name].append(measured["seconds"])
    finally:
        contenders.close()
    return times, last


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Returns the order of a round, rotated so that no contender always follows the same one."""
    first = number % len(names) if names else 0
    return [*names[first:], *names[:first]]


def speed_over(times: Mapping[str, Sequence[float]], name: str, ours: str = "ours") -> list[float]:
    """Ratios of our speed to that of `name`, for every round that both finished."""
    return [theirs / own for theirs, own in zip(times[name], times.get(ours, ()))]

"""How OpenMP's threads wait for each other in a training run: spinning while the machine is idle, asleep while other
work wants its cores. No result depends on it.

Sleeping costs some 20 microseconds a wake-up, hundreds of which a small step has. Spinning beside other work takes the
core from the thread that is waited for, and a step takes ten times as long. libgomp reads its spin count once, when it
is loaded, but spins no more while the process has more OpenMP threads than CPUs (documented at GOMP_SPINCOUNT): so one
more team of threads that sleep is the switch.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

_TASKS = Path("/proc/self/task")
_INTERVAL = 0.2
"""Seconds between two looks at the machine."""
_BUSY = 0.1
"""The share of its time that a thread waits for a core, from which on the machine counts as busy."""
_BUSY_AT_START = 0.02
"""The same share of the start of the process, most of which is no waiting but reading files."""
_QUIET, _MOST_QUIET = 1.0, 60.0
"""Seconds without other work until threads spin again; doubled each time that this was too early."""
_SPINS = 30_000
"""Turns of libgomp's waiting loop, one or two milliseconds: more than passes between two operations of a step."""


def wait_passively(*, spin: bool = False) -> None:
    """Lets the threads of this process sleep where they wait for each other, instead of spinning: on a machine with
    other work a spinning thread takes the core from the one it waits for. It changes no result. With `spin` they spin
    first: for a run that watches the machine (`spinning_while_idle`).

    OpenMP reads the variables when torch loads it, so this comes before torch; what the user has set stays.
    """
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if spin and Path("/proc/self/schedstat").exists():
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def sleep_at_once() -> None:
    """Takes back the spinning of `wait_passively(spin=True)`, for a program that does not watch the machine. Does
    nothing once torch is loaded."""
    if "torch" not in sys.modules and _may_spin():
        del os.environ["GOMP_SPINCOUNT"]


def _may_spin() -> bool:
    """Whether threads of this process spin for as long as `wait_passively(spin=True)` says."""
    return os.environ.get("OMP_WAIT_POLICY") == "PASSIVE" and os.environ.get("GOMP_SPINCOUNT") == str(_SPINS)


class SleepingTeam:
    """OpenMP threads that do nothing. Beside a run's own threads they are more than there are CPUs, so none spins."""

    def __init__(self, libraries: Sequence[ctypes.CDLL], threads: int) -> None:
        self._libraries = libraries
        self._size = max((os.cpu_count() or 1) - threads, 0) + 2  # one of them starts the others
        self._ended, self._thread = Event(), Thread()

    def start(self) -> None:
        ready = Event()
        self._ended.clear()
        self._thread = Thread(target=self._hold, args=(ready,), name="sleeping-team", daemon=True)
        self._thread.start()
        ready.wait()

    def end(self) -> None:
        """libgomp ends a team with the thread that started it. Does nothing if there is none."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _hold(self, ready: Event) -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL), in each of the threads
        for library in self._libraries:
            library.GOMP_parallel(nothing, None, self._size, 0)
        ready.set()
        self._ended.wait()


class SpinSwitch:
    """Decides whether threads may spin, from how long they had to wait for a core."""

    def __init__(self, sleep: Callable[[], None], spin: Callable[[], None]) -> None:
        self._sleep, self._spin = sleep, spin
        self._quiet_since: float | None = None  # None: spinning
        self._quiet_for = _QUIET

    def look(self, waited: float, now: float) -> None:
        """Takes one measurement. `waited`: of the thread that waited longest for a core, the share of the time since
        the last measurement."""
        if waited >= _BUSY:
            if self._quiet_since is None:
                self._sleep()
            self._quiet_since = now
        elif self._quiet_since is not None and now - self._quiet_since >= self._quiet_for:
            self._quiet_since, self._quiet_for = None, min(2 * self._quiet_for, _MOST_QUIET)
            self._spin()


@contextmanager
def spinning_while_idle(threads: int) -> Iterator[None]:
    """Lets `threads` OpenMP threads spin while the machine is idle. Does nothing if the user has chosen how they
    wait."""
    libraries = loaded_gomps() if threads > 1 and _may_spin() else []
    if not libraries:
        yield
        return
    team, ended = SleepingTeam(libraries, threads), Event()
    switch = SpinSwitch(team.start, team.end)
    if _waited_since_start() >= _BUSY_AT_START:
        switch.look(1.0, time.monotonic())

    def watch() -> None:
        before, then = _waited(), time.monotonic()
        while not ended.wait(_INTERVAL):
            after, now = _waited(), time.monotonic()
            longest = max((after[thread] - before[thread] for thread in after.keys() & before.keys()), default=0)
            switch.look(longest / 1e9 / (now - then), now)
            before, then = after, now

    watcher = Thread(target=watch, name="waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        team.end()


def loaded_gomps() -> list[ctypes.CDLL]:
    """The libgomp that torch has loaded, and those of other libraries; none where its threads are another's."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [ctypes.CDLL(path) for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line})]


def _waited() -> dict[str, int]:
    """Nanoseconds that each thread of this process was ready to run and had no core."""
    waited = {}
    for task in _TASKS.iterdir():
        try:
            waited[task.name] = int((task / "schedstat").read_text().split()[1])
        except OSError:  # it has ended
            continue
    return waited


def _waited_since_start() -> float:
    """The share for the main thread, whose start is long enough to tell."""
    ran, waited = map(int, Path("/proc/self/schedstat").read_text().split()[:2])
    return waited / max(ran + waited, 1)

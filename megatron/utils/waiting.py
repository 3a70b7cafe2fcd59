"""Lets OpenMP's threads spin while they wait on an idle machine, and makes them sleep while other work wants cores.

Results do not depend on it. Sleeping costs some 20 microseconds per wake-up, and a small step has hundreds. Spinning
beside other work takes the core from the thread that is waited for, and a step takes ten times as long. The library
libgomp reads its spin count once, when it is loaded. But it does not spin while the process has more OpenMP threads
than CPUs (documented at GOMP_SPINCOUNT), so this module stops the spinning by starting one more team of sleeping
threads.
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
"""Seconds between two measurements."""
_BUSY = 0.1
"""The machine counts as busy if a thread waits for a core for this share of its time."""
_BUSY_AT_START = 0.02
"""Like `_BUSY`, for the share of time since the process started. A starting process mostly reads files."""
_QUIET, _MOST_QUIET = 1.0, 60.0
"""Seconds without other work until threads spin again: at first, at most. Doubled each time that they spin again."""
_SPINS = 30_000
"""Turns of libgomp's waiting loop, one or two milliseconds: more than passes between two operations of a step."""


def wait_passively(*, spin: bool = False) -> None:
    """Sets environment variables that make OpenMP threads sleep while they wait, instead of spinning. On a busy
    machine, a spinning thread takes the core from the thread that it waits for. With `spin`, threads spin for one or
    two milliseconds before they sleep; for programs that use `spinning_while_idle`. Results do not change.

    Call this before torch is loaded, because OpenMP reads the variables then. A no-op if the user has set
    OMP_WAIT_POLICY.
    """
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if spin and Path("/proc/self/schedstat").exists():
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def sleep_at_once() -> None:
    """Undoes the spinning of `wait_passively(spin=True)`, for a program that does not watch the machine. A no-op once
    torch is loaded."""
    if "torch" not in sys.modules and _may_spin():
        del os.environ["GOMP_SPINCOUNT"]


def _may_spin() -> bool:
    """True if the environment is as `wait_passively(spin=True)` sets it."""
    return os.environ.get("OMP_WAIT_POLICY") == "PASSIVE" and os.environ.get("GOMP_SPINCOUNT") == str(_SPINS)


class SleepingTeam:
    """OpenMP threads that do nothing. Together with a run's own threads they outnumber the CPUs, so no OpenMP thread
    spins."""

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
        """Ends the thread that started the team, and libgomp then ends the team. A no-op without a team."""
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
    """Decides whether threads may spin, from how long they waited for a core."""

    def __init__(self, sleep: Callable[[], None], spin: Callable[[], None]) -> None:
        self._sleep, self._spin = sleep, spin
        self._quiet_since: float | None = None  # None: spinning
        self._quiet_for = _QUIET

    def look(self, waited: float, now: float) -> None:
        """Takes one measurement at time `now`. `waited`: share of the time since the last measurement during which the
        thread that waited longest had no core."""
        if waited >= _BUSY:
            if self._quiet_since is None:
                self._sleep()
            self._quiet_since = now
        elif self._quiet_since is not None and now - self._quiet_since >= self._quiet_for:
            self._quiet_since, self._quiet_for = None, min(2 * self._quiet_for, _MOST_QUIET)
            self._spin()


@contextmanager
def spinning_while_idle(threads: int) -> Iterator[None]:
    """Lets `threads` OpenMP threads spin while the machine is idle. A no-op if the user has chosen how they wait."""
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
    """Lists the loaded libgomp libraries, torch's and others; empty if torch uses another OpenMP library."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [ctypes.CDLL(path) for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line})]


def _waited() -> dict[str, int]:
    """Nanoseconds that each thread of this process was ready to run but had no core."""
    waited = {}
    for task in _TASKS.iterdir():
        try:
            waited[task.name] = int((task / "schedstat").read_text().split()[1])
        except OSError:  # it has ended
            continue
    return waited


def _waited_since_start() -> float:
    """Share of time that the main thread has waited for a core, as an estimate for the start of the process."""
    ran, waited = map(int, Path("/proc/self/schedstat").read_text().split()[:2])
    return waited / max(ran + waited, 1)

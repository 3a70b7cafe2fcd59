"""Memory, CPUs and parent of this process, as the system reports them."""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl.h of Linux


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """The resident set of this process now; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def usable_cpus() -> int:
    """Number of CPUs on which this process may run, such as those that Slurm assigns. Ignores CPU quotas."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def signal_at_parent_death(number: signal.Signals) -> bool:
    """Asks the kernel to send this process a signal when its parent dies. False where it cannot (not Linux)."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0


@contextmanager
def signals_held(*numbers: signal.Signals) -> Iterator[None]:
    """Blocks these signals in this thread, and in threads and processes that are started inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies. A no-op on systems other than Linux."""
    if signal_at_parent_death(signal.SIGKILL) and os.getppid() != parent:  # it died before the request
        os._exit(1)


def process_state(number: int) -> str | None:
    """The state letter of a process in /proc (R, S, T, ...); "" if it has ended, None if unknown."""
    try:
        content = Path(f"/proc/{number}/stat").read_bytes()  # the name of a program may be any bytes
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    return content.rpartition(b")")[2].split()[0].decode()


def how_to_continue(number: int) -> str | None:
    """Names a stopped worker process and the command that continues it; None if it is not stopped."""
    if process_state(number) not in ("T", "t"):
        return None
    return f"worker {number} is stopped (SIGSTOP, or a debugger), and all wait for it: kill -CONT {number} continues it"


def process_exists(number: int) -> bool:
    """True if a process of this number runs on this machine, under any user."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

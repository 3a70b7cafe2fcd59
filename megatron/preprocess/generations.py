"""Work in a process that a fresh copy replaces when it has grown, so that memory is flat however long the run is.

Whatever it is that grows (a cache of words, memory in pieces, a library that leaks) is gone with the process. A fork
costs some milliseconds and shares the loaded tokenizer again; making that anew costs ten times as much.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron.tokenizer.fast_engine import resident_bytes

GROWN = 70  # exit code of a process that wants to be replaced
PR_SET_PDEATHSIG = 1
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 2 << 20  # blocks that are given back when they are freed


class Growth:
    """Of this process: `room` is what any work needs, more only if its first task took more."""

    def __init__(self, room: int, allowed: int) -> None:
        self._allowed = allowed
        self._base = resident_bytes() + room
        self._worked = False

    def too_large(self) -> bool:
        """Asked after each task."""
        size = resident_bytes()
        if not self._worked:
            self._base, self._worked = max(self._base, size), True
        return size - self._base > self._allowed


def in_generations(work: Callable[[], bool]) -> NoReturn:
    """Calls `work` in a child of this process, again and again as long as it returns True (it has grown). This process
    only waits, so that each child begins with what is in it now. It ends as the last child ends."""
    while True:
        parent = os.getpid()
        child = os.fork()
        if not child:
            die_with(parent)
            _work_and_exit(work)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != GROWN:
            _end_as(code)


def _work_and_exit(work: Callable[[], bool]) -> NoReturn:
    code = 1
    try:
        # A freed table would be kept for later; one that doubles would leave all its former selves.
        _ask_c_library("mallopt", M_MMAP_THRESHOLD, LARGE_BYTES)
        code = GROWN if work() else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _ask_c_library(name: str, *arguments: int) -> None:
    """Calls that only glibc has."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def die_with(parent: int) -> None:
    """The kernel ends this process with its parent, even in the middle of a long task (elsewhere: after it)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)

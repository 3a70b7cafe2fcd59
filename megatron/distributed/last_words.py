"""What a rank says before SIGTERM ends it.

A launcher sends SIGTERM to all ranks within a tenth of a second after one of them has ended, and the others would go
without a word of why. Python hears a signal between two steps of the main thread, which may wait in a collective for
that very rank; so a thread of its own listens.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_AT_MOST = 5.0  # seconds for what is said
_EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def last_words(say: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM calls `say` from another thread and then ends the process; forked children hear it as ever.

    A script that has its own mind about SIGTERM keeps it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    forks = _Forks()
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # the byte that comes with it is what is listened to
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(heard, say), name="last words", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        forks.listening = False
        os.close(told)  # which the thread reads as the end
        thread.join()
        os.close(heard)


class _Forks:
    """A child must not write into its parent's pipe, nor pass over a signal that is to end it; until it is out of both,
    SIGTERM waits. What is registered at forks is so for good, and therefore asks whether it is still wanted."""

    def __init__(self) -> None:
        self.listening = True
        self._held = threading.local()  # the signals that a thread that forks had blocked before
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._as_ever)

    def _hold(self) -> None:
        self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if self.listening else None

    def _release(self) -> None:
        if self._held.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._held.mask)

    def _as_ever(self) -> None:
        if self._held.mask is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._release()


def _listen(heard: int, say: Callable[[], None]) -> None:
    while numbers := os.read(heard, 64):
        if signal.SIGTERM in numbers:
            end = threading.Timer(_AT_MOST, os._exit, (_EXIT_CODE,))
            end.daemon = True
            end.start()
            with suppress(Exception):
                say()
            os._exit(_EXIT_CODE)

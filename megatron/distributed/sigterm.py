"""Runs an action when SIGTERM arrives, before the process ends.

Launchers send SIGTERM to all ranks a tenth of a second after one of them has ended; the action lets the others print
the cause. Python runs signal handlers only between bytecode instructions of the main thread, which may be blocked in
a collective with the ended rank. A separate thread therefore waits for the signal.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_AT_MOST = 10.0  # seconds for the action
_EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def on_sigterm(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` in another thread on SIGTERM within the context, and then ends the process.

    A script's own handler of SIGTERM is kept, and forked children keep the default behaviour.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    forks = _Forks()

    def handler(number: int, frame: FrameType | None) -> None:
        """Does nothing: the thread reads the byte from the wakeup fd."""

    signal.signal(signal.SIGTERM, handler)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(read_end, action), name="sigterm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        if signal.getsignal(signal.SIGTERM) is handler:  # else another handler was set meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        forks.listening = False
        os.close(write_end)  # ends the thread
        thread.join()
        os.close(read_end)


class _Forks:
    """Restores the default SIGTERM behaviour in forked children, which must not write into their parent's pipe or
    ignore the signal. SIGTERM is blocked during the fork. Fork hooks cannot be unregistered, so `listening` disables
    them."""

    def __init__(self) -> None:
        self.listening = True
        self._held = threading.local()  # the signals that the forking thread had blocked before
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._restore_default)

    def _hold(self) -> None:
        self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if self.listening else None

    def _release(self) -> None:
        if self._held.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._held.mask)

    def _restore_default(self) -> None:
        if self._held.mask is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._release()


def _listen(read_end: int, action: Callable[[], None]) -> None:
    while numbers := os.read(read_end, 64):
        if signal.SIGTERM in numbers:
            end = threading.Timer(_AT_MOST, os._exit, (_EXIT_CODE,))
            end.daemon = True
            end.start()
            with suppress(Exception):
                action()
            os._exit(_EXIT_CODE)

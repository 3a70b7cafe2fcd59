"""Resets what a process inherits from its caller to the usual values. `nohup`, a scheduler or a container may start the
tests with others. Every process that a test starts would inherit them."""

from __future__ import annotations

import os
import resource
import signal
import sys

_SIGNALS = (
    signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD,
    signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGXCPU,
)  # fmt: skip
_FILES, _NEEDED = 4096, 1200


def take_usual_values() -> None:
    """Sets default signal actions, an empty signal mask, umask 022, no core files, and enough open files. Exits where
    the system does not allow the last."""
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, hard if hard < 0 else max(hard, _FILES)))
        except (OSError, ValueError):  # only root may raise a hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            if hard < _NEEDED:
                sys.exit(f"ulimit -n {hard}: the tests open more files at a time; allow at least {_NEEDED}")

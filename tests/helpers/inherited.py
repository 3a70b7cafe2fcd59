"""What a process inherits from its caller, set to the usual values: a shell under `nohup`, a scheduler or a container
starts the tests with others, and every process that a test starts would inherit them in turn."""

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
    """Signals have their default action and none is blocked, new files are writable by their owner alone and readable
    by all, no core is written, and enough files can be opened. Exits where the system does not allow the last."""
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

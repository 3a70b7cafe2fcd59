"""Tests run with the usual signals, umask and limits, however they are started."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.helpers.inherited import take_usual_values

SEEN = """import os, resource, signal
print([signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGCHLD)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), oct(os.umask(0)))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 333, resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def unusual() -> None:
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def and_usual_again() -> None:
    unusual()
    take_usual_values()


def test_what_tests_start_does_not_depend_on_the_caller() -> None:
    here, there, else_ = (
        subprocess.run([sys.executable, "-IS", "-c", SEEN], preexec_fn=before, capture_output=True, text=True).stdout
        for before in (None, and_usual_again, unusual)
    )
    assert here == there != else_ and "SIG_IGN" not in here and here.endswith("set() 0o22\nTrue 0\n"), here


def test_the_tests_begin_with_it() -> None:
    assert "take_usual_values()\n" in (Path(__file__).parents[1] / "conftest.py").read_text()

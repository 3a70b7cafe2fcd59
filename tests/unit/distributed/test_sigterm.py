"""SIGTERM runs the action and then ends the process; forked children keep the default behaviour."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from megatron.distributed.sigterm import on_sigterm


def child(body: Callable[[], None]) -> tuple[int, str]:
    """Exit code (negative: the signal) and output of a fork that receives SIGTERM once it has printed "ready"."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.dup2(write, 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        body()
        os._exit(0)
    os.close(write)
    said = os.read(read, 5)
    os.kill(pid, signal.SIGTERM)
    while more := os.read(read, 100):
        said += more
    os.close(read)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode()


def say(text: str) -> None:
    os.write(1, text.encode())


def waits() -> None:
    with on_sigterm(lambda: say(" last")):
        say("ready")
        time.sleep(30.0)


def ends_by_what_it_says() -> None:
    with on_sigterm(lambda: os._exit(17)):
        say("ready")
        time.sleep(30.0)


def fails_to_say() -> None:
    with on_sigterm(lambda: 1 // 0):  # type: ignore[arg-type,return-value]
        say("ready")
        time.sleep(30.0)


def has_left() -> None:
    with on_sigterm(lambda: say(" last")):
        pass
    say("ready")
    time.sleep(30.0)


def has_a_mind_of_its_own() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    with on_sigterm(lambda: say(" last")):
        say("ready")
        time.sleep(30.0)


def ends_a_child_of_its_own() -> None:
    """A forked child receives its own signal, and this process does not."""
    with on_sigterm(lambda: say(" last")):
        pid = os.fork()
        if pid == 0:
            time.sleep(30.0)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.2)
        say("ready" if code == -signal.SIGTERM else f"child: {code}")
        time.sleep(30.0)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (waits, 143, "ready last"),
        (ends_by_what_it_says, 17, "ready"),
        (fails_to_say, 143, "ready"),
        (has_left, -signal.SIGTERM, "ready"),
        (has_a_mind_of_its_own, 3, "ready"),
        (ends_a_child_of_its_own, 143, "ready last"),
    ],
)
def test_sigterm(body: Callable[[], None], code: int, said: str) -> None:
    assert child(body) == (code, said)

"""Waiting threads spin or sleep, depending on how long they had to wait for a core; libgomp itself is switched."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from megatron.utils.process import usable_cpus
from megatron.utils.waiting import SpinSwitch


class Recorded:
    def __init__(self) -> None:
        self.states = ["spin"]
        self.switch = SpinSwitch(lambda: self.states.append("sleep"), lambda: self.states.append("spin"))

    def after(self, *looks: tuple[float, float]) -> list[str]:
        for now, waited in looks:
            self.switch.look(waited, now)
        return self.states


def test_an_idle_machine_leaves_them_spinning() -> None:
    assert Recorded().after((0, 0.0), (1, 0.03), (2, 0.09)) == ["spin"]


def test_other_work_makes_them_sleep_until_it_has_been_quiet_for_a_second() -> None:
    run = Recorded()
    assert run.after((0, 0.5), (1, 0.4), (1.5, 0.0), (1.9, 0.0)) == ["spin", "sleep"]
    assert run.after((2.1, 0.0), (3, 0.0)) == ["spin", "sleep", "spin"]


def test_work_that_comes_and_goes_lets_them_sleep_longer_each_time() -> None:
    run, now, quiet = Recorded(), 0.0, []
    for _ in range(7):
        busy = now
        run.switch.look(0.9, now)
        while run.states[-1] == "sleep":
            now += 0.5
            run.switch.look(0.0, now)
        quiet.append(now - busy)
    assert quiet == [1, 2, 4, 8, 16, 32, 60]


SWITCHED = """
import os, time, torch
from pathlib import Path
from megatron.utils.waiting import SleepingTeam, loaded_gomps

torch.set_num_threads(2)
before = set(os.listdir("/proc/self/task"))
x = torch.randn(512, 512)
x @ x
(worker,) = set(os.listdir("/proc/self/task")) - before

def sleeps():
    '''Whether the worker is asleep at any moment after an operation.'''
    x @ x
    for _ in range(2000):
        if Path(f"/proc/self/task/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "S":
            return True
        time.sleep(0.0001)
    return False

def comes_to(asleep):
    '''libgomp counts a thread as gone a moment after Python does, so a first look may be too early.'''
    return any(sleeps() == asleep for _ in range(50))

team = SleepingTeam(loaded_gomps(), 2)
print(comes_to(False))
team.start()
print(comes_to(True))
team.end()
print(comes_to(False))
team.end()
"""


@pytest.mark.skipif(sys.platform != "linux" or usable_cpus() < 2, reason="needs Linux and two CPUs")
def test_a_sleeping_team_stops_the_spinning_of_a_run_and_its_end_allows_it() -> None:
    """libgomp is set to spin for ever; the kernel reports the worker's state."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "INFINITY", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SWITCHED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


WATCHED = """
import threading
from megatron.pretrain import pretrain
import torch
from megatron.utils import waiting
names = lambda: sorted(thread.name for thread in threading.enumerate() if thread.name in ("waiting", "sleeping-team"))
waiting._waited_since_start = lambda: 0.03
with waiting.spinning_while_idle(2):
    print(names())
with waiting.spinning_while_idle(1):
    print(names())
print(names())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux only")
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "['sleeping-team', 'waiting']"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "[]"), ({"GOMP_SPINCOUNT": "5"}, "[]")],
)
def test_a_run_watches_the_machine_unless_the_user_chose(given: dict[str, str], expected: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", WATCHED], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [expected, "[]", "[]"]


SHOW_POLICY = (
    "; import os, sys; "
    "print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        ("import megatron", {}, "None None False"),  # only what trains is our business
        ("from megatron.pretrain import pretrain", {}, "PASSIVE 30000 False"),  # which watches the machine
        ("from megatron.compat import initialize", {}, "PASSIVE None True"),
        ("from megatron.pretrain import pretrain", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None False"),
        ("from megatron.pretrain import pretrain", {"OMP_WAIT_POLICY": "PASSIVE"}, "PASSIVE None False"),
        ("from megatron.pretrain import pretrain", {"GOMP_SPINCOUNT": "7"}, "PASSIVE 7 False"),
        (
            "import types, sys; sys.modules['torch'] = types.ModuleType('torch'); "
            "from megatron.pretrain import pretrain",
            {},
            "None None True",
        ),
        (
            "from megatron.utils.command_line import run_tool_module as tool; import sys; "
            "sys.argv[1:] = ['/nowhere']; tool('megatron.cli.verify_checkpoint')",
            {},
            "PASSIVE None False",
        ),
    ],
)
def test_threads_wait_passively_unless_the_user_chose(first: str, given: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | given
    command = [sys.executable, "-c", first + SHOW_POLICY]
    assert subprocess.check_output(command, env=environment, text=True).strip() == expected


def test_the_library_of_threads_has_taken_it() -> None:
    """Asks OpenMP itself."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    command = [sys.executable, "-c", "from megatron.pretrain import pretrain; import torch"]
    done = subprocess.run(
        command, env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True, check=True
    )
    assert re.search(r"OMP_WAIT_POLICY\s*=\s*'PASSIVE'", done.stdout + done.stderr), done.stderr
    assert re.search(r"GOMP_SPINCOUNT\s*=\s*'30000'", done.stdout + done.stderr), done.stderr

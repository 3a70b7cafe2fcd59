"""The warm Python of the tests acts like the real one, and no process outlives its client."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.warm import warm_folder, warm_python

PLACE = "import os, sys; print(sys.argv, sys.path[0], os.getcwd(), __name__, os.environ.get('X'), os.umask(0o22))"
LOADED = """import sys
print("numpy" in sys.modules, "torch" in sys.modules)
import numpy
print("torch" in sys.modules)
import torch, torch.nn
print("transformers" in sys.modules, torch.__spec__.origin, torch.get_num_threads())
"""
AT_THE_END = "import atexit, threading as t; atexit.register(print, 2); t.Timer(0.1, print, (1,)).start()"
PROGRAMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "code": (["-c", PLACE, "a", "-b"], {}),
    "unbuffered code": (["-u", "-c", f"{PLACE}; print(sys.stdout.write_through)"], {}),
    "standard input": (["-", "a"], {"input": PLACE}),
    "a module": (["-m", "json.tool", "--compact"], {"input": "[1, {}]"}),
    "no such module": (["-m", "no_such_module"], {}),
    "a script": (["place.py", "a"], {}),
    "an absolute script": (["{folder}/place.py"], {"env": {**os.environ, "X": "1"}}),
    "no such script": (["nowhere.py"], {}),
    "an exit code": (["-c", "raise SystemExit(3)"], {}),
    "an exit with a text": (["-c", "import sys; print('out'); sys.exit('why')"], {}),
    "a signal": (["-c", "import os; os.kill(os.getpid(), 15)"], {}),
    "what runs at the end": (["-c", AT_THE_END], {}),
    "what is loaded": (["-c", LOADED], {}),
    "another number of threads": (["-c", LOADED], {"env": {**os.environ, "OMP_NUM_THREADS": "2"}}),
    "variables of Python": (["-c", "import sys; print(sys.path)"], {"env": {**os.environ, "PYTHONPATH": "/nowhere"}}),
    "other options": (["-W", "ignore", "-c", PLACE], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_the_real_one_does(name: str, tmp_path: Path) -> None:
    words, given = PROGRAMS[name]
    (tmp_path / "place.py").write_text(PLACE)
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    real, warm = (
        subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, **given)
        for python in (sys.executable, warm_python())
    )
    said = warm.stderr.replace(warm_python(), sys.executable)
    assert (warm.returncode, warm.stdout, said) == (real.returncode, real.stdout, real.stderr)


INHERITED = """import os, resource, signal
print(oct(os.umask(0)), resource.getrlimit(resource.RLIMIT_NOFILE))
print(os.sched_getaffinity(0), signal.getsignal(signal.SIGHUP))
"""


def unusual() -> None:
    """Sets what a process inherits to unusual values."""
    os.umask(0o127)
    resource.setrlimit(resource.RLIMIT_NOFILE, (333, 444))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_it_inherits_what_the_real_one_inherits() -> None:
    real, warm, usual = (
        subprocess.run([python, "-c", INHERITED], preexec_fn=before, capture_output=True, text=True, check=True).stdout
        for python, before in ((sys.executable, unusual), (warm_python(), unusual), (sys.executable, None))
    )
    assert warm == real
    assert not set(real.split()) & {usual.split()[0], usual.split()[-1]}, "nothing is as usual"


def test_an_error_is_told_and_a_program_that_it_starts_is_warm_too() -> None:
    done = subprocess.run(
        [warm_python(), "-c", "import sys; print(sys.executable); 1/0"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, f"{warm_python()}\n")
    assert done.stderr.startswith("Traceback") and "server.py" not in done.stderr and "ZeroDivisionError" in done.stderr


def test_ranks_of_torchrun_are_warm(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import os, sys; print(sys.executable, os.environ['RANK'])")
    command = [warm_folder() / "torchrun", "--standalone", "--nproc_per_node", "2", tmp_path / "rank.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == [f"{warm_python()} {rank}" for rank in (0, 1)], done.stderr


WAITS = """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 5), (signal.SIGKILL, -9), (signal.SIGINT, -2)])
def test_signals_reach_the_process(sent: signal.Signals, code: int) -> None:
    client = subprocess.Popen(
        [warm_python(), "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    client.send_signal(sent)
    assert client.wait(10) == code
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_clients_that_are_killed_at_any_moment_leave_the_server_alive() -> None:
    """Kills clients before they ask, while the process starts, and as it ends."""
    for moment in range(40):
        client = subprocess.Popen([warm_python(), "-c", "pass"], stderr=subprocess.DEVNULL)
        time.sleep(moment * 0.004)
        client.send_signal(signal.SIGTERM if moment % 2 else signal.SIGKILL)
        client.wait(10)
    done = subprocess.run([warm_python(), "-c", "print(1)"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr

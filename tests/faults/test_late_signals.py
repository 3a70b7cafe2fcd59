"""A signal before the first step or after the last one does not kill a run with --exit-signal-handler."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import REPOSITORY, flags, launch

SCRIPT = f"""
import atexit, os, signal, sys
sys.path.insert(0, {str(REPOSITORY)!r})
import pretrain_gpt
from megatron.pretrain import Hook, pretrain
from megatron.training import exit

moments, number = sys.argv.pop(1).split(","), signal.Signals[sys.argv.pop(1)]

def now(moment):
    print("moment", moment, flush=True)
    if moment in moments:
        os.kill(os.getpid(), number)

class Moments(Hook):
    def on_end(self):
        now("hooks")

def datasets_provider(run, counts):
    now("data")
    return pretrain_gpt.datasets_provider(run, counts)

def after(name, function):
    def called(*given, **named):
        result = function(*given, **named)
        now(name)
        return result
    return called

atexit.register(now, "atexit")
exit.ExitRecord.ended = after("record", exit.ExitRecord.ended)
exit._leave = after("left", exit._leave)
pretrain(datasets_provider, pretrain_gpt.model_provider, pretrain_gpt.forward_step, hooks=[Moments()])
now("returned")
"""
END = ("hooks", "record", "left", "returned", "atexit")


@pytest.mark.parametrize(
    ("number", "moments", "reason"),
    [("SIGUSR1", END, "done"), ("SIGTERM", ("hooks",), "done"), ("SIGUSR1", ("data",), "signal")],
    ids=["at the end", "SIGTERM", "at the start"],
)
def test_a_signal_outside_of_the_steps_does_not_kill_the_run(
    number: str, moments: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    script = tmp_path / "pretrain_signalled.py"
    script.write_text(SCRIPT)
    argv = flags(train_iters=2, save=tmp_path / "ckpt", save_interval=100, exit_signal_handler=True)
    done = launch([",".join(moments), number, *argv], script=script)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("moment")] == [
        f"moment {moment}" for moment in ("data", *END)
    ]
    record = json.loads((tmp_path / "ckpt" / "exit_reason.json").read_text())
    assert (record["reason"], record["iteration"]) == (reason, 2 if reason == "done" else 1)


ENDS = f"""
import atexit, os, signal, sys, threading, time
sys.path.insert(0, {str(REPOSITORY)!r})
from megatron.training.signals import SignalFlag

def now(kill=os.kill, me=os.getpid(), write=os.write, *, moment):
    write(1, moment.encode())
    kill(me, number)

class Late:
    def __del__(self, now=now):
        now(moment=" del")

number = signal.Signals[sys.argv[1]]
atexit.register(now, moment=" atexit")
flag = SignalFlag((number,))
flag.stay()
late = Late()
sys.kept = Late()  # lives as long as the interpreter
flag.restore()
if number == signal.SIGUSR1:
    now(moment="end")
    threading.Thread(target=lambda: (time.sleep(0.05), now(moment=" thread"))).start()
"""


@pytest.mark.parametrize("number", ["SIGUSR1", "SIGTERM", "SIGINT"])
def test_a_signal_while_python_ends_is_ignored(number: str) -> None:
    """Python restores a signal's default action before it destroys its last objects."""
    done = subprocess.run([sys.executable, "-c", ENDS, number], capture_output=True, text=True, timeout=60)
    before = "end thread" if number == "SIGUSR1" else ""
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{before} atexit del del", "")


def test_a_second_sigterm_after_the_end_acts_as_usual() -> None:
    """Scripts may continue after the run."""
    twice = ENDS.replace("if number == signal.SIGUSR1:", "now(moment='1'); now(moment='2'); now(moment='3')\nif False:")
    done = subprocess.run([sys.executable, "-c", twice, "SIGTERM"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "12")

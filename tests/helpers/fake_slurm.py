"""Slurm on this machine: as much of sbatch, srun and scontrol as the batch scripts of examples/slurm use.

The fake srun starts its tasks with Slurm's variables. Signals act as in the real one: SIGUSR1 goes to every task,
SIGTERM kills them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.runs import REPOSITORY

JOB = "4711"

_SRUN = f"""#!{sys.executable} -S
import os, signal, subprocess, sys, time

words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
nodes, each = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
step = {{"SLURM_STEP_NUM_TASKS": nodes * each, "SLURM_STEP_ID": 0, "SLURM_STEP_NODELIST": "127.0.0.[1-%d]" % nodes,
        "SLURM_STEP_TASKS_PER_NODE": "%d(x%d)" % (each, nodes) if nodes > 1 else each}}
tasks = []
def to_all(number):
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)
signal.signal(signal.SIGUSR1, lambda *_: to_all(signal.SIGUSR1))
signal.signal(signal.SIGTERM, lambda *_: to_all(signal.SIGKILL))
for rank in range(nodes * each):
    own = {{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each}}
    environment = {{**os.environ, **{{name: str(value) for name, value in own.items()}}}}
    tasks.append(subprocess.Popen(words, env=environment))
with open(os.environ["FAKE_SLURM"] + "/tasks", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
ending = None
while any(task.poll() is None for task in tasks):
    time.sleep(0.02)
    if ending is None and any(task.poll() for task in tasks):
        ending = time.monotonic()
        to_all(signal.SIGTERM)
    if ending is not None and time.monotonic() - ending > 30:
        to_all(signal.SIGKILL)
sys.exit(max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks))
"""
_SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show job") echo "JobId=$3 JobName=pretrain"; echo "   JobState=$(cat "$FAKE_SLURM/state") Reason=None" ;;
    requeue*) echo "$2" >> "$FAKE_SLURM/requeued" ;;
    *) exit 1 ;;
esac
"""


@dataclass
class FakeSlurm:
    folder: Path
    parts: int = 0
    """Number of times that the job has started."""
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.be("RUNNING")

    def be(self, state: str) -> None:
        (self.folder / "state").write_text(state)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def requeued(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().split() if path.exists() else []

    def start(self, script: Path, words: list[str], environment: dict[str, str], **options: int) -> None:
        """Runs `sbatch --option=value script words...`. A second call with the same script requeues the job, which runs
        from a copy of the script in the folder of its submission."""
        directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", script.read_text(), re.M))
        assert "requeue" in directives and directives["signal"].startswith("B:USR1@")
        asked = {name: int(directives[name]) for name in ("nodes", "ntasks-per-node", "cpus-per-task")} | {
            name.replace("_", "-"): value for name, value in options.items()
        }
        copy = self.folder / "slurm_script"
        copy.write_bytes(script.read_bytes())
        own = {"SLURM_JOB_ID": JOB, "SLURM_NNODES": asked["nodes"], "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
               "SLURM_CPUS_PER_TASK": asked["cpus-per-task"], "FAKE_SLURM": self.folder}  # fmt: skip
        if self.parts:
            own["SLURM_RESTART_COUNT"] = self.parts
        path = f"{self.folder / 'bin'}{os.pathsep}{environment['PATH']}"
        full = {**environment, **{name: str(value) for name, value in own.items()}, "PATH": path}
        with (self.folder / "log").open("ab" if directives.get("open-mode") == "append" else "wb") as log:
            self.process = subprocess.Popen(
                ["bash", str(copy), *words], cwd=REPOSITORY, env=full, stdout=log, stderr=log, start_new_session=True
            )
        self.parts += 1

    def wait_until(self, seen: Callable[[str], bool], seconds: float = 60.0) -> None:
        assert self.process is not None
        end = time.monotonic() + seconds
        while not seen(self.log):
            assert self.process.poll() is None and time.monotonic() < end, self.log[-4000:]
            time.sleep(0.01)

    def tell_batch(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def tell_tasks(self, number: signal.Signals) -> None:
        for task in (self.folder / "tasks").read_text().split():
            os.kill(int(task), number)

    def end(self, seconds: float = 90.0) -> int:
        """Returns the exit code of the job."""
        assert self.process is not None
        return self.process.wait(seconds)

"""Batch scripts for Slurm, on a fake Slurm: a run that is interrupted and requeued equals an uninterrupted one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_slurm import JOB, FakeSlurm
from tests.helpers.launchers import SMALL, Material, clean_environment, start
from tests.helpers.runs import REPOSITORY, read_metrics, same_numbers

SCRIPTS = REPOSITORY / "examples" / "slurm"
STEPS = 40
TRAIN = [*SMALL, "--num-layers", "1", "--train-iters", str(STEPS), "--save-interval", "1000", "--hidden-dropout", "0.1"]
TRAIN += ["--eval-iters", "0"]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.made_in(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="module")
def whole(material: Material) -> list[dict[str, str]]:
    """Log of an uninterrupted run, started by torchrun."""
    metrics = material.folder / "whole.jsonl"
    environment = material.environment("whole", GPUS_PER_NODE=2)
    done = start("qwen3_0.6b", [*TRAIN, "--metrics-jsonl", str(metrics)], environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return logged(metrics)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[FakeSlurm]:
    job = FakeSlurm(tmp_path / "slurm")
    yield job
    if job.process is not None and job.process.poll() is None:
        job.tell_batch(signal.SIGKILL)


def logged(metrics: Path) -> list[dict[str, Any]]:
    return [same_numbers(record) for record in read_metrics(metrics)]


@pytest.mark.parametrize(
    ("script", "nodes", "each", "how"),
    [("one_node", 1, 2, "ahead of the time limit"), ("many_nodes", 2, 1, "preempted")],
    ids=["one node", "many nodes"],
)
def test_a_job_that_is_interrupted_goes_on_as_if_it_had_not_been(
    script: str, nodes: int, each: int, how: str, slurm: FakeSlurm, material: Material, whole: list[dict[str, str]]
) -> None:
    """Slurm signals the batch script ahead of the time limit; a preemption may signal only the tasks."""
    metrics, batch = material.folder / f"{script}.jsonl", SCRIPTS / f"{script}.sbatch"
    words = ["examples/qwen3_0.6b.sh", *TRAIN, "--metrics-jsonl", str(metrics)]
    environment = material.environment(script)

    slurm.start(batch, words, environment, nodes=nodes, ntasks_per_node=each)
    slurm.wait_until(lambda log: " iteration        2/" in log)
    if how == "preempted":
        slurm.tell_tasks(signal.SIGTERM)
    else:
        slurm.tell_batch(signal.SIGUSR1)
    assert slurm.end() == 0 and slurm.requeued == [JOB], slurm.log[-3000:]
    (saved,) = [int(step) for step in re.findall(r"saved checkpoint at iteration +(\d+)", slurm.log)]
    assert 2 <= saved < STEPS and len(logged(metrics)) == saved

    slurm.start(batch, words, environment, nodes=nodes, ntasks_per_node=each)
    assert slurm.end() == 0 and slurm.requeued == [JOB], "a run that is done is not queued again"
    assert f"continuing at iteration {saved}" in slurm.log and slurm.log.count("running on 2 x") == 2, "one log"
    assert logged(metrics) == whole


# Stand-in for the ranks: a task ends at once or on a signal; the first one may leave a record.
TASK = """import os, signal, time
def end(*_):
    if os.environ["SLURM_PROCID"] == "0" and os.environ["SAID"]:
        with open(os.environ["CHECKPOINT_PATH"] + "/exit_reason.json", "w") as file:
            file.write(os.environ["SAID"])
    os._exit(int(os.environ["CODE"]))
how = os.environ["HOW"]
if how == "ends":
    end()
if how == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waits":
    signal.signal(signal.SIGUSR1, end)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "begins" and os.environ["SLURM_PROCID"] == "0":
    os.remove(os.environ["CHECKPOINT_PATH"] + "/exit_reason.json")
print("ready", flush=True)
while how != "ends":
    time.sleep(1)
"""
DONE, SIGNAL = '{"reason": "done", "exit_code": 0}', '{"reason": "signal", "text": "SIGTERM", "exit_code": 0}'
LOST, FAILED = '{"reason": "PeerLostError", "exit_code": 17}', '{"reason": "NonFiniteError", "exit_code": 14}'


def task(folder: Path) -> str:
    """Writes a launcher that runs TASK, and returns its path."""
    (folder / "launcher.sh").write_text(f"exec {sys.executable} -S -c '{TASK}'\n")
    return str(folder / "launcher.sh")


@pytest.mark.parametrize(
    ("how", "code", "said", "told", "state", "ends"),
    [
        ("ends", 0, DONE, None, "RUNNING", 0),
        ("ends", 0, SIGNAL, None, "RUNNING", "again"),
        ("waits", 0, DONE, signal.SIGUSR1, "RUNNING", 0),
        ("waits", 0, SIGNAL, signal.SIGTERM, "RUNNING", "again"),
        ("waits", 0, SIGNAL, signal.SIGTERM, "CANCELLED", 0),
        ("waits", 0, SIGNAL, signal.SIGTERM, "", "again"),
        ("starts", 0, "", signal.SIGUSR1, "RUNNING", "again"),
        ("begins", 0, "", signal.SIGUSR1, "RUNNING", "again"),
        ("waits", 17, LOST, signal.SIGUSR1, "RUNNING", "again"),
        ("waits", 17, FAILED, signal.SIGUSR1, "RUNNING", 14),
        ("waits", 19, "", signal.SIGUSR1, "RUNNING", 19),
        ("ends", 17, FAILED, None, "RUNNING", 14),
        ("ends", 17, "", None, "RUNNING", 17),
        ("is killed", 0, "", None, "RUNNING", 137),
        ("ends", 2, "", None, "RUNNING", 2),
    ],
    ids=["done", "tasks alone told", "told at the end", "told", "cancelled", "unknown to Slurm",
         "told before they listen", "killed before they record",
         "lost in saving", "failed when told", "no progress", "failed", "lost", "killed",
         "usage"],
)  # fmt: skip
def test_what_is_queued_again(
    how: str, code: int, said: str, told: signal.Signals | None, state: str, ends: int | str,
    slurm: FakeSlurm, tmp_path: Path,
) -> None:  # fmt: skip
    """An exit reason that an earlier part recorded is ignored."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "exit_reason.json").write_text(FAILED if ends == "again" else SIGNAL)
    environment = clean_environment(CHECKPOINT_PATH=checkpoints, CODE=code, SAID=said, HOW=how)
    tasks = 1 if told is None else 2  # of two that end by themselves, srun ends the later one
    slurm.start(SCRIPTS / "one_node.sbatch", [task(tmp_path)], environment, ntasks_per_node=tasks)
    if told is not None:
        slurm.wait_until(lambda log: log.count("ready") == 2)
        slurm.be(state)
        slurm.tell_batch(told)
    assert slurm.end() == (0 if ends == "again" else ends), slurm.log
    assert slurm.requeued == ([JOB] if ends == "again" else []), slurm.log


@pytest.mark.parametrize("words", [["--save", "a", "--load", "b"], ["--load=elsewhere"]])
def test_a_job_goes_on_from_where_it_saves(words: list[str], slurm: FakeSlurm) -> None:
    slurm.start(SCRIPTS / "many_nodes.sbatch", words, clean_environment())
    where = "a" if "--save" in words else "experiments/llama3_8b"
    assert slurm.end() == 2 and slurm.log.count("\n") == 1
    assert slurm.log.startswith(f"error: --load: a job that is queued again goes on from {where},")


def test_without_slurm_the_launcher_is_named() -> None:
    words = ["bash", str(SCRIPTS / "one_node.sbatch"), "examples/gpt3_175b.sh", "--lr", "1"]
    done = subprocess.run(words, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch("error: there is no srun here; .* bash examples/gpt3_175b.sh\n", done.stderr)


@pytest.mark.parametrize("flags", [["--save", "{}"], ["--lr", "1", "--save={}", "--load={}"]])
def test_the_record_is_looked_for_where_the_run_saves(flags: list[str], slurm: FakeSlurm, tmp_path: Path) -> None:
    environment = clean_environment(CODE=0, SAID=SIGNAL, HOW="ends")
    words = [task(tmp_path), *(flag.format(tmp_path) for flag in flags)]
    slurm.start(SCRIPTS / "one_node.sbatch", words, environment, ntasks_per_node=1)
    assert slurm.end() == 0 and slurm.requeued == [JOB], slurm.log


def test_a_requeue_that_slurm_refuses_is_told(slurm: FakeSlurm, tmp_path: Path) -> None:
    environment = clean_environment(CHECKPOINT_PATH=tmp_path, HOW="starts")
    slurm.start(SCRIPTS / "one_node.sbatch", [task(tmp_path)], environment, ntasks_per_node=1)
    slurm.wait_until(lambda log: "ready" in log)
    (slurm.folder / "requeued").mkdir()
    slurm.tell_batch(signal.SIGUSR1)
    assert slurm.end() == 1 and "error: interrupted, and Slurm does not queue the job again" in slurm.log

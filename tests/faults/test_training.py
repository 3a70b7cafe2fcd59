"""Faults while a run trains: every rank ends in bounded time, and the cause is printed once and recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import manifest
from megatron.checkpoint.lock import DirectoryLock
from tests.helpers.forked import launch_forked, start_forked
from tests.helpers.runs import REPOSITORY, flags, launch, launch_command, pretrain_here, read_metrics, same_numbers
from tests.helpers.warm import warm_python

BOUND = 60.0  # seconds on a loaded machine; what these tests guard against is a wait of minutes, or for ever

# A pretrain script whose rank 1 misbehaves in its 7th micro-batch, as its first argument says.
SCRIPT = f"""
import os, signal, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
import pretrain_gpt
from megatron.pretrain import pretrain
from megatron.errors import DataError

how = sys.argv.pop(1)
calls = iter(range(10**9))

def forward_step(model, batch):
    loss, count = pretrain_gpt.forward_step(model, batch)
    if next(calls) == 6 and os.environ.get("RANK") == "1":
        if how == "raise":
            raise ValueError("planted on rank 1")
        if how == "data":
            raise DataError("planted data error")
        if how == "nan":
            loss = loss * float("nan")
        if how.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
    return loss, count

if how == "kill, seen late":  # the launcher's SIGTERM comes a tenth of a second after the kill, and before the look
    from megatron.distributed.heartbeat import Heartbeat
    look = Heartbeat._check
    def late(heartbeat, *what):
        time.sleep(0.7)
        look(heartbeat, *what)
    Heartbeat._check = late

pretrain(pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, forward_step)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_faulty.py"
    path.write_text(SCRIPT)
    return path


# how -> (message of the failing rank, the record's reason, its exit code)
FAULTS = {
    "raise": ("ValueError: planted on rank 1", "ValueError", 1),
    "data": ("error (rank 1): planted data error", "DataError", 11),
    "nan": ("error: iteration 4: the loss is nan (rank 1: samples ", "NonFiniteError", 14),
    "kill": ("", "PeerLostError", 17),
    "kill, seen late": ("", "PeerLostError", 17),
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_that_fails_ends_the_run(tmp_path: Path, script: Path, how: str) -> None:
    save = tmp_path / "ckpt"
    argv = [how, *flags(train_iters=200, num_workers=1, save=save, save_interval=1000, exit_signal_handler=True)]
    started = time.monotonic()
    run = launch_forked if how == "nan" else launch  # at nan all ranks end by themselves, so no launcher ends them
    done = run(argv, ranks=2, script=script, timeout=2 * BOUND)
    assert time.monotonic() - started < BOUND
    assert done.returncode != 0
    message, reason, code = FAULTS[how]
    assert (save / "exit_reason.json").exists(), done.stdout + done.stderr
    record = json.loads((save / "exit_reason.json").read_text())
    assert (record["reason"], record["exit_code"]) == (reason, code)
    if message:
        assert done.stderr.count(message) == 1, done.stderr
        assert "a collective failed" not in done.stderr, "the other rank only lost its peer"
    assert not list(save.glob("iter_*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 8}, "is not divisible by"),
        ({"num_layers": "two"}, "--num-layers"),
        ({"load": "no/such/folder"}, "--load no/such/folder: does not exist"),
    ],
)
def test_a_usage_error_is_said_once(changes: dict[str, Any], message: str) -> None:
    done = launch(flags(**changes), ranks=2)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and message in lines[0], done.stderr


def test_print_config_is_printed_once() -> None:
    done = launch_forked([*flags(), "--print-config"], ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nnum_layers ") == 1


PIPELINE = {"pipeline_model_parallel_size": 2, "num_layers": 4}


@pytest.mark.parametrize(
    ("ranks", "axes", "to", "number"),
    [
        (2, {}, "rank 1", signal.SIGTERM),
        (4, PIPELINE, "rank 2", signal.SIGUSR1),
        (4, PIPELINE, "launcher", signal.SIGTERM),
        (2, {}, "launcher", signal.SIGINT),
    ],
    ids=["one of two", "one of pp2 x dp2", "torchrun of pp2 x dp2", "Ctrl-C"],
)
def test_a_signal_stops_all_ranks_at_one_step_and_the_run_goes_on(
    ranks: int, axes: dict[str, Any], to: str, number: signal.Signals, tmp_path: Path
) -> None:
    """The resumed run equals an uninterrupted one bit for bit, with dropout. torchrun passes SIGTERM and SIGINT on to
    all workers and reports a failure whatever they return. The test that signals one rank has no launcher."""
    save, whole, pieces = tmp_path / "ckpt", tmp_path / "whole.jsonl", tmp_path / "pieces.jsonl"
    settings = {**axes, "train_iters": None, "train_samples": 8 * 400}
    argv = flags(**settings, exit_signal_handler=True, save=save, save_interval=10**6)
    argv_of_the_first = [*argv, "--metrics-jsonl", str(pieces)]
    if to == "launcher":
        process = _training(argv_of_the_first, ranks)
        _wait_for(" iteration        3/", process)
        process.send_signal(number)
        out, err = process.communicate(timeout=BOUND)
        assert process.returncode == 1, out + err
    else:
        _stopped_by_a_signal_to(
            int(to.split()[1]), number, argv_of_the_first, [tmp_path / str(n) for n in range(ranks)]
        )
    record = json.loads((save / "exit_reason.json").read_text())
    assert (record["reason"], record["text"]) == ("signal", number.name) and 3 <= record["iteration"] < 400
    assert [path.name for path in save.glob("iter_*")] == [f"iter_{record['iteration']:07d}"]
    again = flags(**settings, exit_interval=record["iteration"] + 3)
    for more in (["--metrics-jsonl", str(whole)], ["--load", str(save), "--metrics-jsonl", str(pieces)]):
        done = launch_forked([*again, *more], ranks=ranks)
        assert done.returncode == 0, done.stderr
    assert [same_numbers(r) for r in read_metrics(pieces)] == [same_numbers(r) for r in read_metrics(whole)]


def _stopped_by_a_signal_to(rank: int, number: signal.Signals, argv: list[str], places: list[Path]) -> None:
    ranks = start_forked(argv, REPOSITORY / "pretrain_gpt.py", places)
    try:
        deadline = time.monotonic() + BOUND
        while not any(" iteration        3/" in log.read_text() for log in places[0].parent.glob("*.out")):
            assert time.monotonic() < deadline, "no third step"
            time.sleep(0.01)
        os.kill(ranks[rank].pid, number)
        assert [each.wait(BOUND) for each in ranks] == [0] * len(ranks)
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.parametrize(("ranks", "interval"), [(1, 10**6), (2, 10**6), (1, 2)])
def test_ctrl_c_is_one_line(ranks: int, interval: int, tmp_path: Path) -> None:
    """torchrun adds its own traceback, and exits with 1."""
    process = _training(flags(train_iters=10**6, num_workers=1, save=tmp_path, save_interval=interval), ranks)
    _wait_for(" iteration        3/", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=BOUND)
    assert process.returncode == (130 if ranks == 1 else 1)
    left = rf"start again with --load {tmp_path} to continue from iteration (\d+)"
    if interval > 2:
        left = r"no checkpoint was saved, so the (\d+) iterations are lost; give a --save-interval below 1000000 .*"
    line = re.search(rf"error: interrupted \(SIGINT\); {left}\n", err)
    assert line is not None and "KeyboardInterrupt" not in err and "[rank" not in err, err
    assert err.count("interrupted (SIGINT)") == 1 and (ranks > 1 or err == line[0])
    record = json.loads((tmp_path / "exit_reason.json").read_text())
    assert (record["reason"], record["exit_code"]) == ("InterruptError", 130)
    assert re.match(rf"interrupted \(SIGINT\); {left}$", record["text"])
    steps = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert (steps[-1:] == [f"iter_{int(line[1]):07d}"]) is (interval == 2)


# Its third step is a long one, and says when it has begun.
SLOW = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
import pretrain_gpt
from megatron.pretrain import pretrain

calls = iter(range(10**9))

def forward_step(model, batch):
    if next(calls) == 2:
        print("long step", flush=True)
        try:
            time.sleep({BOUND})
        finally:
            print("its end", flush=True)
    return pretrain_gpt.forward_step(model, batch)

pretrain(pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, forward_step)
"""


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_step(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_slow.py"
    script.write_text(SLOW)
    argv = flags(exit_signal_handler=True, micro_batch_size=8, save=tmp_path, save_interval=10**6)
    process = _training(argv, 1, script)
    _wait_for("long step", process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=BOUND / 2)
    assert (process.returncode, out) == (130, "its end\n"), err
    assert err.startswith("error: interrupted (SIGINT)") and err.count("\n") == 1
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.parametrize(
    ("to", "patience"),
    [("the only rank", 20.0), ("worker 0", 20.0), ("worker 1", 20.0), ("launcher", 20.0), ("worker 1", 0.0)],
)
def test_sigterm_without_the_handler_is_said_once_and_recorded(to: str, patience: float, tmp_path: Path) -> None:
    """Without heartbeats every rank that gets the signal prints it."""
    ranks = 1 if to == "the only rank" else 2
    settings = {"num_workers": 1, "save": tmp_path, "save_interval": 10**6, "heartbeat_timeout_seconds": patience}
    process = _training(flags(train_iters=10**6, **settings), ranks)
    _wait_for(" iteration        3/", process)
    os.kill(_ranks_of(process.pid, tmp_path)[int(to[-1])] if to.startswith("worker") else process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=BOUND)
    said, *more = [line for line in err.splitlines() if line.startswith("error")]
    assert re.search(r"ended by SIGTERM at step \d+( \(.*\))?; no checkpoint was saved, .* --exit-signal-handler", said)
    assert not (patience and more), err
    assert process.returncode == (143 if ranks == 1 else 1), err
    assert not to.startswith("worker") or "exitcode  : 143" in err, err
    record = json.loads((tmp_path / "exit_reason.json").read_text())
    assert (record["reason"], record["exit_code"]) == ("TerminatedError", 143) and not list(tmp_path.glob("iter_*"))


def _training(
    argv: list[str], ranks: int, script: Path = REPOSITORY / "pretrain_gpt.py", *, python: str | None = None
) -> subprocess.Popen[str]:
    """Starts a run of warm processes (tests/helpers/warm), which pass signals on, or of real interpreters."""
    command = [*launch_command(script, ranks, python=python or warm_python()), *argv]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(text: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"it ended before {text!r}"


def _ranks_of(launcher: int, save: Path) -> list[int]:
    """Processes that torchrun has started, by rank: the other ones with this folder in their command."""
    found = {}
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if process != launcher and os.fsencode(save) in words:
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                (rank,) = (int(each[5:]) for each in variables if each.startswith(b"RANK="))
                found[rank] = process
    return [found[rank] for rank in sorted(found)]


def _workers_of(launcher: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


@pytest.mark.parametrize("launcher", ["run", "launch"])
def test_a_finished_run_exits_with_zero(launcher: str) -> None:
    done = launch(flags(num_workers=1, eval_iters=1, train_iters=2), ranks=2, launcher=launcher)
    assert done.returncode == 0, done.stderr


def test_an_error_in_a_run_with_data_workers_does_not_hang() -> None:
    """The workers ignore SIGTERM, which Python sends to its children before it waits for them."""
    done = launch(flags(num_workers=2, fp16=True, loss_scale=1e30), timeout=BOUND)
    assert done.returncode == 14, done.stderr
    assert done.stderr.count("error: iteration 1: a gradient is not finite") == 1


@pytest.mark.parametrize("after", ["\n", " iteration        3/"], ids=["at once", "in training"])
def test_a_closed_log_pipe_ends_the_run(after: str) -> None:
    process = _training(flags(train_iters=10**6), 1)
    _wait_for(after, process)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(BOUND) == 13
    assert process.stderr.read().startswith("error: the log (stdout) has lost its reader; send it to a file")


# One rank, in this process.

Capture = pytest.CaptureFixture[str]


def test_usage_errors_come_before_any_directory_is_made(tmp_path: Path) -> None:
    assert pretrain_here(flags(save=tmp_path / "ckpt", save_interval=2, hidden_size=33)) == 2
    assert not (tmp_path / "ckpt").exists()


def test_a_save_directory_that_cannot_be_written_is_refused_at_the_start(capsys: Capture) -> None:
    assert pretrain_here(flags(save="/proc/no/ckpt", save_interval=2)) == 13
    said = capsys.readouterr()
    assert "/proc/no" in said.err and " iteration " not in said.out


def test_a_second_run_is_refused_at_the_start_and_leaves_the_first_ones_record(tmp_path: Path, capsys: Capture) -> None:
    lock = DirectoryLock.acquire(tmp_path, "the-first")
    (tmp_path / "exit_reason.json").write_text("{}")
    assert pretrain_here(flags(save=tmp_path, save_interval=2)) == 2
    lock.release()
    assert "in use by run the-first" in capsys.readouterr().err
    assert (tmp_path / "exit_reason.json").read_text() == "{}"


def test_a_killed_run_leaves_neither_its_data_workers_nor_its_lock(tmp_path: Path) -> None:
    save = tmp_path / "ckpt"
    argv = flags(train_iters=100_000, num_workers=2, save=save, save_interval=2, log_interval=1)
    run = _training(argv, 1, python=sys.executable)
    _wait_for(" iteration        3/", run)
    workers = _workers_of(run.pid)
    assert len(workers) == 2
    run.kill()
    run.wait()
    DirectoryLock.acquire(save, "the-next").release()
    deadline = time.monotonic() + 2  # torch's own watch of the parent takes 5 s
    while any(map(_runs, workers)):
        assert time.monotonic() < deadline, "a data worker outlives its run"


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_full_disk_under_the_metrics_file_is_named(capsys: Capture) -> None:
    assert pretrain_here(flags(metrics_jsonl="/dev/full")) == 13
    assert capsys.readouterr().err.startswith("error: --metrics-jsonl /dev/full: writing failed (No space left")


def test_a_tensorboard_directory_that_cannot_be_made_is_named(capsys: Capture) -> None:
    assert pretrain_here(flags(tensorboard_dir="/proc/no/tb")) == 2
    assert capsys.readouterr().err.startswith("error: --tensorboard-dir /proc/no/tb: cannot be written")


def test_a_damaged_checkpoint_is_passed_over_loudly(tmp_path: Path, capsys: Capture) -> None:
    whole, rest = tmp_path / "whole.jsonl", tmp_path / "rest.jsonl"
    assert pretrain_here(flags(save=tmp_path, save_interval=4, metrics_jsonl=whole)) == 0
    damaged = next((tmp_path / "iter_0000006").rglob("model_optim_rng.pt"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    assert pretrain_here(flags(load=tmp_path, metrics_jsonl=rest)) == 0
    said = capsys.readouterr().out
    assert "FALLING BACK" in said and "continuing at iteration 4" in said
    wanted = [same_numbers(record) for record in read_metrics(whole)[4:]]
    assert [same_numbers(record) for record in read_metrics(rest)] == wanted, "nothing of step 6 is left"
    assert pretrain_here(flags(load=tmp_path, strict_load=True)) == 12


def test_skip_hash_loads_what_the_checksums_would_refuse(tmp_path: Path, capsys: Capture) -> None:
    assert pretrain_here(flags(save=tmp_path, save_interval=4)) == 0
    damaged = next((tmp_path / "iter_0000006").rglob("model_optim_rng.pt"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    assert pretrain_here(flags(load=tmp_path, strict_load=True, skip_hash=True)) == 0
    said = capsys.readouterr().out
    assert said.count("--skip-hash: the checksums of") == 1 and "continuing at iteration 6" in said
    damaged.write_bytes(content + b"0")  # sizes are compared all the same
    assert pretrain_here(flags(load=tmp_path, strict_load=True, skip_hash=True)) == 12


def test_a_resume_under_other_conditions_says_so(tmp_path: Path, capsys: Capture) -> None:
    """Compares the manifest's determinism fingerprint: silent under equal conditions; other kernels are named."""
    assert pretrain_here(flags(save=tmp_path, save_interval=4, kernels="ref")) == 0
    fingerprint = manifest.read(tmp_path / "iter_0000006").fingerprint
    assert fingerprint["device"] == "cpu" and fingerprint["kernels"]["rope"] == "ref"
    capsys.readouterr()
    assert pretrain_here(flags(load=tmp_path, kernels="ref")) == 0
    assert "under other conditions" not in capsys.readouterr().out
    assert pretrain_here(flags(load=tmp_path, kernels="auto")) == 0
    assert "was saved under other conditions (kernels." in capsys.readouterr().out
    assert pretrain_here(flags(load=tmp_path, kernels="auto", deterministic_mode=True)) == 12
    torch.use_deterministic_algorithms(False)
    assert "--deterministic-mode: " in capsys.readouterr().err
    assert pretrain_here(flags(load=tmp_path, kernels="auto", finetune=True)) == 0  # weights only: another run
    assert "under other conditions" not in capsys.readouterr().out


def test_a_start_forgets_the_reason_of_the_run_before(tmp_path: Path) -> None:
    (tmp_path / "exit_reason.json").write_text('{"reason": "done"}')
    assert pretrain_here(flags(save=tmp_path, save_interval=2, fp16=True, loss_scale=1e30)) == 14
    assert json.loads((tmp_path / "exit_reason.json").read_text())["reason"] == "NonFiniteError"

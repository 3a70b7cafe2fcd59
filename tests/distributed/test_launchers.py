"""Real launchers and real processes: start, restart, clean finish, and the ways in which a start fails. Those of the
restart and of failures are warm (tests/helpers/warm)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import flags
from tests.helpers.warm import warm_python

WORKER = Path(__file__).with_name("launch_worker.py")
ROOT = WORKER.parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch"]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(**extra: str) -> dict[str, str]:
    """The process's environment without a launcher's variables."""
    launchers = ("TORCHELASTIC", "SLURM_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "OMP_", "GLOO_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**clean, **extra}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=100)


def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(text) for text in re.findall(r"REPORT (\{[^}]*\})", done.stdout)]
    assert found, done.stdout
    return sorted(found, key=lambda report: report["rank"])


def rank_env(rank: int, port: int, **extra: str) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return environment(**{name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", **extra)


def test_plain_python_is_one_process() -> None:
    (report,) = reports(run([sys.executable, str(WORKER)]))
    assert (report["world_size"], report["total"], report["launcher"], report["guarded"]) == (1, 1.0, "python", False)


@pytest.mark.parametrize(
    "launcher",
    [
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2"],
        [*LAUNCH, "--nproc_per_node", "2", "--nnodes", "1", "--node_rank", "0", "--master_addr", "localhost"],
    ],
    ids=["torchrun", "torch.distributed.launch"],
)
def test_launchers(launcher: list[str]) -> None:
    port = [] if "--standalone" in launcher else ["--master_port", str(free_port())]
    found = reports(run([*launcher, *port, str(WORKER)]))
    assert [(r["rank"], r["local_rank"], r["world_size"], r["total"]) for r in found] == [
        (0, 0, 2, 3.0),
        (1, 1, 2, 3.0),
    ]
    assert all(r["launcher"] == "torchrun" and r["threads"] == max(1, CORES // 2) for r in found)
    assert all(r["guarded"] == (sys.platform == "linux") for r in found)


@pytest.mark.slow
def test_a_killed_rank_is_restarted() -> None:
    """The second attempt must not read keys that the first one left in the launcher's store."""
    command = [warm_python(), *TORCHRUN[1:], "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    found = reports(run([*command, str(WORKER), "--die-at-first-attempt"]))
    assert [(r["rank"], r["attempt"], r["total"]) for r in found] == [(0, 1, 3.0), (1, 1, 3.0)]


def test_ranks_finish_cleanly_while_the_axes_still_exist() -> None:
    for _ in range(2):
        port = free_port()
        ranks = [
            subprocess.Popen(
                [sys.executable, str(WORKER)], env=rank_env(rank, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=100) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs


def test_a_port_that_is_taken_is_a_usage_error() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run([warm_python(), str(WORKER), "--timeout", "5"], env=rank_env(0, port))
    assert done.returncode == 2, done.stderr
    assert f"--master-port {port}: already in use" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_never_come_are_waited_for_in_bound(rank: int) -> None:
    begin = time.monotonic()
    done = run([warm_python(), str(WORKER), "--timeout", "3"], env=rank_env(rank, free_port()))
    assert time.monotonic() - begin < 60
    assert done.returncode == 16, done.stderr
    assert "error: --distributed-timeout-minutes 0.05: the ranks did not all meet at 127.0.0.1:" in done.stderr
    assert ("rank 1 has not come" if rank == 0 else "rank 0, which keeps the store, does not answer") in done.stderr


def test_two_machines_with_other_settings_are_told_before_a_group_exists(tmp_path: Path) -> None:
    """Two processes stand for two machines, started by hand, with a master address that is not loopback."""
    port, machine = free_port(), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": socket.gethostname()}
    ranks = [
        subprocess.Popen(
            [warm_python(), str(ROOT / "pretrain_gpt.py"), *flags(seed=seed, save=tmp_path / f"machine-{rank}")],
            env={**rank_env(rank, port), **machine},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, seed in enumerate((1, 2))
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    for _, said in outputs:
        (line,) = [line for line in said.splitlines() if line.startswith("error")]
        assert re.search(
            r"--seed is [12] on rank [01] and [12] on rank [01]; start all ranks with one command", line
        ), line


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux only")
def test_a_rank_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"import subprocess, sys; subprocess.run([sys.executable, {str(WORKER)!r}, '--sleep', {str(pid_file)!r}])"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env=rank_env(0, 1, TORCHELASTIC_RUN_ID="x"), start_new_session=True
    )
    try:
        rank = wait_for_pid(pid_file)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert gone_within(rank, seconds=10), "the rank is an orphan that goes on"
    finally:
        launcher.kill()


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError("the rank never started")


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False

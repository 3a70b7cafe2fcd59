"""A copy of the checkout in a temporary folder, for tests of commands as users type them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.warm import warm_python
from tests.policy.rules import ROOT, repository_files


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Checkout:
    root: Path
    warm: bool = False
    """Forks `python` and `torchrun` from a process that has imported torch; for tests of what commands do, not how they
    start."""

    def run(self, script: str, *, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs lines of shell as a user would, with the Python of the tests (or a warm one) first on the PATH.

        Fixed port numbers become free ones: two runs of the tests on one machine must not meet.
        """
        script = re.sub(r"(MASTER_PORT=|--master_port )\d+", lambda found: f"{found.group(1)}{free_port()}", script)
        python = warm_python() if self.warm else sys.executable
        programs = (str(Path(python).parent), str(Path(sys.executable).parent), os.environ["PATH"])
        environment = {**os.environ, "PYTHON": python, "PATH": os.pathsep.join(programs)}
        command = ["bash", "-euo", "pipefail", "-c", script]
        return subprocess.run(
            command, cwd=self.root, env=environment, text=True, timeout=timeout, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def must_run(self, script: str, *, timeout: float = 300) -> str:
        done = self.run(script, timeout=timeout)
        assert done.returncode == 0, f"exit code {done.returncode} of:\n{script}\n\n{done.stdout[-6000:]}"
        return done.stdout


def copy_checkout(target: Path) -> Checkout:
    for path in repository_files():
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    # Build outputs are untracked, but belong to a set-up checkout. They exist wherever the tests run. Python compares a
    # compiled module with the time and size of its source, which the copy has too.
    built = [*(ROOT / "megatron").rglob("*.so"), *(ROOT / "megatron").rglob(f"*.{sys.implementation.cache_tag}.pyc")]
    for path in [*built, ROOT / "megatron" / "ops" / "_kernels.json"]:
        if path.is_file():
            (target / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy2(path, target / path.relative_to(ROOT))
    if (ROOT / "build").is_dir():
        of_the_tests = shutil.ignore_patterns("headers-*", "emulated-*")
        shutil.copytree(ROOT / "build", target / "build", ignore=of_the_tests)
    return Checkout(target)

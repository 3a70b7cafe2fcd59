"""What the system tells about this process: memory, CPUs, and the death of its parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.utils.process import peak_resident_bytes, resident_bytes, signal_at_parent_death, usable_cpus
from tests.helpers.fresh import in_fresh_process


def test_the_resident_memory_is_read() -> None:
    assert resident_bytes() > 1 << 20 or not Path("/proc/self/statm").exists()
    assert peak_resident_bytes() > 1 << 20


SHOW_POLICY = "; import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        ("import megatron", None, "None False"),  # only what trains is our business
        ("from megatron import pretrain", None, "PASSIVE False"),
        ("from megatron import pretrain", "ACTIVE", "ACTIVE False"),
        (
            "import types, sys; sys.modules['torch'] = types.ModuleType('torch'); from megatron import pretrain",
            None,
            "None True",
        ),
        (
            "from megatron.utils.command_line import run_tool_module as tool; import sys; "
            "sys.argv[1:] = ['/nowhere']; tool('megatron.checkpoint.verify_cli')",
            None,
            "PASSIVE False",
        ),
    ],
)
def test_threads_wait_passively_unless_the_user_chose(first: str, given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    command = [sys.executable, "-c", first + SHOW_POLICY]
    assert subprocess.check_output(command, env=environment, text=True).strip() == expected


def test_the_library_of_threads_has_taken_it() -> None:
    """OpenMP itself is asked."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", "from megatron import pretrain; import torch"]
    done = subprocess.run(
        command, env=environment | {"OMP_DISPLAY_ENV": "TRUE"}, capture_output=True, text=True, check=True
    )
    assert re.search(r"OMP_WAIT_POLICY\s*=\s*'PASSIVE'", done.stdout + done.stderr), done.stderr


def cpus_of_one() -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return usable_cpus()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_only_granted_cpus_count() -> None:
    assert usable_cpus() == len(os.sched_getaffinity(0))
    assert in_fresh_process(cpus_of_one) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux only")
def test_a_process_is_killed_when_its_parent_dies() -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            os.write(writer, b"1" if signal_at_parent_death(signal.SIGKILL) else b"0")
            time.sleep(60)
        else:
            time.sleep(0.5)  # until the child has asked
        os._exit(0)
    os.close(writer)
    begun = time.monotonic()
    assert os.read(reader, 1) == b"1"
    assert os.read(reader, 1) == b""  # both are gone
    assert time.monotonic() - begun < 30
    os.waitpid(parent, 0)
    os.close(reader)

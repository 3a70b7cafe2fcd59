"""System data about this process: memory, CPUs, and the death of its parent."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron.utils.process import peak_resident_bytes, resident_bytes, signal_at_parent_death, usable_cpus
from tests.helpers.fresh import in_fresh_process


def test_the_resident_memory_is_read() -> None:
    assert resident_bytes() > 1 << 20 or not Path("/proc/self/statm").exists()
    assert peak_resident_bytes() > 1 << 20


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

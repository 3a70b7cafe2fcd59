"""What a step frees is there for the next one without a page fault."""

from __future__ import annotations

import subprocess
import sys

PASSES = """
import ctypes, resource, sys
from megatron.utils.heap import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(100_000) for _ in range(1000)]  # on the heap, 24 pages each
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_second_pass(how: str) -> int:
    """In a process of its own: the setting is the whole process's, and its main thread's heap is meant."""
    return int(subprocess.run([sys.executable, "-c", PASSES, how], capture_output=True, text=True, check=True).stdout)


def test_the_heap_keeps_what_is_freed() -> None:
    assert faults_of_second_pass("keep") < 1000 < 20_000 < faults_of_second_pass("give back")

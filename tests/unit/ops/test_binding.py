"""csrc/common/stable.h takes what torch gives it and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.ops.library import PATH, library
from tests.helpers.warm import warm_python
from tests.policy.rules import ROOT

# Says of each operation by how many bytes 10,000 calls let the memory in use grow.
GROWTH = """
import ctypes, gc, sys
import torch
torch.ops.load_library(sys.argv[1])
ops, libc = torch.ops.megatron_native, ctypes.CDLL(None)
class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e in_use f g".split()]
libc.mallinfo2.restype = Mallinfo2
def in_use():
    gc.collect()
    return libc.mallinfo2().in_use + libc.mallinfo2().mapped
x, row, few = torch.randn(3, 8), torch.randn(8), torch.randn(3)
scores, mask, weight = torch.randn(1, 2, 3, 4), torch.zeros(1, 1, 3, 4, dtype=torch.bool), torch.randn(5, 8)
heads, seed = torch.randn(1, 3, 2, 8), torch.tensor([5])
def refused():
    try:
        ops.few_rows(x, weight, few)
    except RuntimeError:
        return
    raise SystemExit("not refused")
for name, call in {
    "few_rows": lambda: (ops.few_rows(x, weight, weight[:, 0].contiguous()), ops.few_rows(x, weight, None)),
    "softmax": lambda: (ops.softmax_forward(scores, mask, 0, 1.0), ops.softmax_forward(scores, None, 0, 1.0)),
    "norm": lambda: [ops.norm_backward(x, grad, x, row, few, few, True) for grad in (x, None)],
    "attention": lambda: ops.attention_forward(heads, heads, heads, None, None, 0, 1.0, 0.5, seed),
    "refused": refused,
}.items():
    for _ in range(1000):
        call()
    before = in_use()
    for _ in range(10_000):
        call()
    print(name, in_use() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallinfo2 is glibc's")
def test_nothing_is_left_of_a_call() -> None:
    if library().missing is not None:
        pytest.skip("no kernels here")
    command = [warm_python(), "-c", GROWTH, str(PATH)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    growth = dict(line.split() for line in done.stdout.splitlines())
    assert len(growth) == 5
    # The smallest thing that could be left, a word of 8 bytes, takes 32: 320,000 for all calls.
    assert all(int(grown) < 100_000 for grown in growth.values()), growth

"""The processor's peak as a contender: only the step's multiplications and additions, in registers.

No step can be faster, whatever the matrix library. The peak therefore bounds the possible speed-up over another
contender on this machine.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.parts.peers import Shape, Step
from benchmarks.parts.turns import NotInstalledError

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")


def operations(shape: Shape) -> int:
    """Number of multiplications and additions of one step's products, forward and backward, with causal attention and
    without recomputation."""
    tokens, hidden = shape.batch * shape.seq, shape.hidden
    weights = shape.layers * 12 * hidden**2 + hidden * shape.vocab
    seen = shape.batch * shape.seq * (shape.seq + 1) // 2  # pairs of a query and a key
    return 6 * tokens * weights + 12 * shape.layers * seen * hidden


def peak_step(shape: Shape, dtype: torch.dtype, threads: int) -> Step:
    halves = int(dtype == torch.bfloat16)
    library = _compiled()
    at_once = library.peak_operations(halves)
    if at_once == 0:
        raise NotInstalledError(f"this processor's peak in {dtype} is unknown; {_SOURCE.name} lists the known ones")
    times = operations(shape) // threads // at_once
    pool = ThreadPoolExecutor(threads)

    def step() -> torch.Tensor:
        list(pool.map(lambda _: library.peak_repeat(times, halves), range(threads)))
        return torch.zeros(())

    return step


def _compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "peak.so"
        try:
            subprocess.run(["c++", *_FLAGS, str(_SOURCE), "-o", str(made)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotInstalledError(f"needs a C++ compiler that supports {' '.join(_FLAGS[:2])}: {error}") from error
        library = ctypes.CDLL(str(made))
    library.peak_operations.restype = ctypes.c_long
    library.peak_repeat.argtypes = [ctypes.c_long, ctypes.c_int]
    library.peak_repeat.restype = None
    return library

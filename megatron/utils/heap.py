"""Memory that one step frees is what the next one needs: the C library keeps it."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_ON_HEAP = 32 << 20  # the most that glibc allows, and what its own threshold grows to
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Freed memory at the end of the heap is not handed back to the system, which would give it again page by page,
    zeroed, in the next pass: on a CPU 2 % of a step, and not the same in every pass. Returns whether it was arranged:
    the C library is glibc."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP))

"""Loads modules without looking for garbage, which takes a tenth of a start's time and finds none."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_torch() -> Iterator[None]:
    """Whoever imports torch makes half a million objects that stay. They are not collected while they are made, nor
    ever looked at again, in this process and its forks. Does nothing if torch is there already."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

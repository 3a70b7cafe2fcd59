"""What is set before torch is loaded, and how it is loaded."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.utils.waiting import wait_passively


def before_torch(*, trains: bool = False) -> None:
    """Sets what libraries read from the environment when torch is loaded, unless the user has. No result depends on it.

    torch's C++ tells of each lost connection with two dozen stack frames, around the one line in which we name the rank
    that is lost. With TORCH_CPP_LOG_LEVEL=WARNING they are there again.
    """
    wait_passively(spin=trains)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def loading_torch() -> Iterator[None]:
    """Loads modules without looking for garbage, which takes a tenth of a start's time and finds none.

    Whoever imports torch makes half a million objects that stay. They are not collected while they are made, nor
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

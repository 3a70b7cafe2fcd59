"""Environment of libraries, set before torch is loaded, and a faster import of torch."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.utils.waiting import wait_passively


def before_torch(*, trains: bool = False) -> None:
    """Sets environment variables that libraries read when torch is loaded, unless the user has. Results stay the same.

    For each lost connection, torch's C++ code would print two dozen stack frames around the message that names the lost
    rank. TORCH_CPP_LOG_LEVEL=ERROR turns them off; a user's WARNING keeps them.
    """
    wait_passively(spin=trains)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def loading_torch() -> Iterator[None]:
    """Imports modules with the garbage collector off, which saves a tenth of a start's time.

    Importing torch makes half a million objects that stay. They are also exempt from later collections, in this process
    and its forks. A no-op if torch is loaded already."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

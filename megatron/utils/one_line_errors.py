"""Prints user errors of a script as one line with the place of the call, without a traceback."""

import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import TracebackType

from megatron.errors import MegatronError

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


@cache
def install() -> None:
    """Prints uncaught errors of megatron.errors as `error: FILE:LINE: text`; others go to the previous hook."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        spawned = _of_a_spawned_process(error)
        if isinstance(error, MegatronError):
            place = _place(trace)
            for line in error.lines:
                print(f"error: {place}{line}", file=sys.stderr)
        elif spawned:
            print(f"error: {spawned}", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _of_a_spawned_process(error: BaseException) -> str:
    """Line for a megatron error that ended a process of torch.multiprocessing.spawn; empty for other errors. The
    parent's exception has the process's traceback as text."""
    if type(error).__name__ != "ProcessRaisedException":
        return ""
    kind, _, text = str(error).strip().rpartition("\n")[2].partition(": ")
    return f"process {getattr(error, 'error_index', 0)}: {text}" if kind.startswith("megatron.errors.") else ""


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's own files."""
    for frame in reversed(traceback.extract_tb(trace)):
        library = frame.filename.startswith((_PACKAGE, "<")) or "site-packages" in Path(frame.filename).parts
        if not library:
            return f"{Path(frame.filename).name}:{frame.lineno}: "
    return ""

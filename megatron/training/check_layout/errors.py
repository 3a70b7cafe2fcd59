"""What goes wrong in a user's script or in this package, said in one line instead of a traceback."""

from __future__ import annotations

import traceback

from megatron.errors import MegatronError

_LONGEST = 300


class CheckError(MegatronError):
    """The check failed with an exception that is not one of our own errors."""

    exit_code = 2


def in_one_line(error: BaseException) -> str:
    """`ValueError: its text (script.py, line 12)`, with the innermost frame outside installed packages."""
    text = " ".join(str(error).split())[:_LONGEST]
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if "site-packages" not in frame.filename] or list(frames)
    where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"

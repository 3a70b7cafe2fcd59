"""Ends the program, when this is imported, on a Python that is too old for this package: a checkout can meet one, and
fails with a riddle. It is the first import of pretrain_gpt.py and of the tools, and itself runs on older ones."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    print(
        f"error: Python {sys.version.split()[0]} at {sys.executable}: not supported; use Python 3.11 to 3.13 "
        "(bash examples/quickstart.sh finds one and makes a .venv with it)",
        file=sys.stderr,
    )
    raise SystemExit(2)

"""The first import of pretrain_gpt.py and of the tools. It ends the program where `megatron` cannot be imported: on a
Python that is too old, and where another package of that name hides this one. It itself runs on older Pythons."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def refusal() -> str | None:
    """Why nothing can run here. A regular package (a folder with an __init__.py) hides every namespace package of its
    name, even from a later folder of the path; Megatron-LM's is one in some versions."""
    if sys.version_info < (3, 11):  # noqa: UP036
        return (
            f"Python {sys.version.split()[0]} at {sys.executable}: not supported; use Python 3.11 to 3.13 "
            "(bash examples/quickstart.sh finds one and makes a .venv with it)"
        )
    found = find_spec("megatron")
    if found is not None and found.has_location:
        return (
            f"{found.origin}: another package megatron hides this one; take its folder from PYTHONPATH, or uninstall "
            "it from this Python"
        )
    return None


if (reason := refusal()) is not None:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)


def run(command: str) -> int:
    """Runs the command of `megatron.cli` whose module is named, and returns its exit code."""
    from megatron.utils.command_line import run_tool_module

    return run_tool_module(f"megatron.cli.{command}")

"""The command lines of tools/, a file each. None of them imports torch to print its `--help`."""

from __future__ import annotations

import megatron.utils.supported_python  # noqa: F401


def run(command: str) -> int:
    """Runs the command whose module is named, and returns its exit code."""
    from megatron.utils.command_line import run_tool_module

    return run_tool_module(f"megatron.cli.{command}")

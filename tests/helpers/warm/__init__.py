"""Provides a `python` and a `torchrun` whose processes are forked from one that has imported torch and transformers.

    command = [warm_python(), "pretrain_gpt.py", ...]      # or PATH=warm_folder():$PATH for a shell's commands

The script runs as `__main__` in its own process with its arguments, environment, folder, files and limits. It imports
this project itself, but saves the two seconds of imports that every torch process spends. Tests of starting itself
(launchers, the quickstart, variables that are read when torch is loaded) start real interpreters; `client.py` lists
what falls back to one.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def warm_folder() -> Path:
    """Folder with `python`, `python3` and `torchrun`. The server starts at the first call and ends with us."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    socket = folder / "socket"
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(_end, server, folder)
    for name in ("python", "python3", "torchrun"):
        program = folder / name
        program.write_text(
            f"#!{sys.executable} -IS\n"  # -S: it needs nothing that is installed, and starts in a moment
            f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport client\n"
            f"client.main({sys.executable!r}, {str(socket)!r}, {name == 'torchrun'})\n"
        )
        program.chmod(0o755)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n", "the warm server did not start"
    return folder


def warm_python() -> str:
    return str(warm_folder() / "python")


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.communicate()  # it ends when its input does
    shutil.rmtree(folder, ignore_errors=True)

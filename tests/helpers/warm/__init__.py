"""A `python` and a `torchrun` whose processes are forked from one that has imported torch and transformers already.

    command = [warm_python(), "pretrain_gpt.py", ...]      # or PATH=warm_folder():$PATH for a shell's commands

What runs is what would run: the script, its arguments, environment, folder, files and limits, as `__main__`, in a
process of its own, which imports everything of this project itself. Only the two seconds of imports that every torch
process spends are spent once. Tests of starting itself (launchers, the quickstart, variables that are read when torch
is loaded) start real interpreters: see `client.py` for what falls back to one by itself.
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
    """Has `python`, `python3` and `torchrun`. The server starts when this is first asked for, and ends with us."""
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

"""Replaces `python`: asks the server for a forked process and hands over everything that a process inherits. Passes
signals on, and ends as that process ends.

Becomes the real interpreter where a fork would differ: with options other than -u, -c and -m, or if the server has
other values of variables that are read when an interpreter or a library starts. Standard library only.
"""

# ruff: noqa: PTH109, PTH113, PTH118, PTH120
# Importing pathlib would take longer than all else here.

from __future__ import annotations

import array
import marshal
import os
import re
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

READ_AT_START = re.compile(r"PYTHON[A-Z]|LD_|MALLOC_|HF_|TRANSFORMERS_|TOKENIZERS_|(MKL|OPENBLAS)_NUM_THREADS$")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_STACK")


def program_of(words: list[str]) -> tuple[str, str, list[str]] | None:
    """Splits a `python` command line: ("script", path, rest), ("-m", name, rest), or ("-c" or "-", text, rest)."""
    words = list(words)
    while words and words[0] == "-u":
        words.pop(0)
    if len(words) >= 2 and words[0] in ("-m", "-c"):
        return words[0], words[1], words[2:]
    if words and words[0] == "-" and not sys.stdin.isatty():
        return "-", sys.stdin.read(), words[1:]
    if words and os.path.isfile(words[0]):
        return ("script", words[0], words[1:])
    return None


def main(real: str, path: str, torchrun: bool) -> None:
    words = ["-m", "torch.distributed.run", *sys.argv[1:]] if torchrun else sys.argv[1:]
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    size = int.from_bytes(_exactly(link, 8), "little")
    servers: dict[str, str] = marshal.loads(_exactly(link, size))
    if _read_at_start(servers) != _read_at_start(dict(os.environ)) or (program := program_of(words)) is None:
        os.execv(real, [real, *words])
    asked: dict[str, Any] = {
        "program": program,
        "executable": os.path.join(os.path.dirname(path), "python"),
        "unbuffered": words[0] == "-u",
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "umask": _umask(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "ignored": [int(one) for one in FORWARDED if signal.getsignal(one) is signal.SIG_IGN],
    }
    content = marshal.dumps(asked)
    header = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    link.sendmsg([len(content).to_bytes(8, "little")], header)
    link.sendall(content)

    def forward(number: int, _: Any) -> None:
        with suppress(OSError):  # the process has ended, and how is on its way
            link.send(bytes([number]))

    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    status = _exactly(link, 4)
    code = int.from_bytes(status, "little", signed=True)
    if code < 0:  # by a signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(code)


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_START.match(name)}


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _exactly(link: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = link.recv(size - len(content))
        if not part:
            os.write(2, b"the warm server is gone\n")
            os._exit(70)
        content += part
    return content

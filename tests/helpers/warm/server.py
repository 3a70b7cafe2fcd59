"""The server that `client.py` asks for a process: it has imported torch and transformers, and forks itself.

A forked process hides those modules until the program first imports one of their group. So code that asks `"torch" in
sys.modules` gets the answer of a fresh interpreter.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import marshal
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# A program that imports one module of a group finds the whole group loaded, and the groups before it.
GROUPS = (
    ("numpy", "numpy.random"),
    ("torch", "torch.distributed.run", "torch._dynamo", "torch.profiler", "torch.utils.data", "torch.distributed.fsdp"),
    ("yaml", "packaging.version", "tqdm.auto", "PIL.Image", "regex", "safetensors.torch", "tokenizers"),
    ("transformers", "transformers.generation", "transformers.pipelines"),
)


class Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder whose modules are already loaded."""

    def __init__(self, group: dict[str, types.ModuleType], before: Hidden | None) -> None:
        self.group, self.before = group, before

    def hide(self) -> None:
        for name in self.group:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self.group.get(name)
        if module is None or module.__spec__ is None:
            return None
        known = module.__spec__
        found = importlib.machinery.ModuleSpec(
            name, self, origin=known.origin, is_package=known.submodule_search_locations is not None
        )
        found.submodule_search_locations = known.submodule_search_locations
        found.has_location = known.has_location
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = self.group[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
        self.show()

    def show(self) -> None:
        """Shows all modules of the group, because one has imported the others."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            if self.before is not None:
                self.before.show()
            for name, module in self.group.items():
                sys.modules.setdefault(name, module)
            if "torch" in self.group:  # which has read this when it was loaded
                self.group["torch"].set_num_threads(
                    int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
                )


def imported() -> list[Hidden]:
    groups: list[Hidden] = []
    for names in GROUPS:
        known = set(sys.modules)
        for name in names:
            importlib.import_module(name)
        new = {name: module for name, module in sys.modules.items() if name not in known}
        standard = {name for name in new if name.partition(".")[0] in sys.stdlib_module_names}
        third_party = {name: module for name, module in new.items() if name not in standard}
        groups.append(Hidden(third_party, groups[-1] if groups else None))
    return groups


class Server:
    """Forks a process for each client, reports how the process ended, and passes its signals on."""

    def __init__(self, path: str) -> None:
        self.environment = marshal.dumps(dict(os.environ))
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(path)
        self.listening.listen(64)
        self.waker, self.woken = socket.socketpair()  # a byte for every process that ends
        self.waker.setblocking(False)
        self.woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests: when they end, so does this
        signal.set_wakeup_fd(self.waker.fileno())
        self.running: dict[int, socket.socket] = {}
        self.asking: set[socket.socket] = set()
        self.chooser = selectors.DefaultSelector()
        for one in (self.listening, self.woken, 0):
            self.chooser.register(one, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        """Returns only in forked processes, with their client's request."""
        os.write(1, b"ready\n")
        while True:
            for key, _ in self.chooser.select():
                if key.fileobj == 0:
                    self.end()
                elif key.fileobj is self.listening:
                    self.accept()
                elif key.fileobj is self.woken:
                    self.reap()
                elif key.fileobj in self.asking:
                    if (asked := self.fork(key.fileobj)) is not None:
                        return asked
                elif isinstance(key.fileobj, socket.socket):
                    self.forward(key.fileobj)

    def end(self) -> None:
        """Stops the server when the tests have ended."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def accept(self) -> None:
        link, _ = self.listening.accept()
        _send(link, len(self.environment).to_bytes(8, "little") + self.environment)
        self.asking.add(link)
        self.chooser.register(link, selectors.EVENT_READ)

    def fork(self, link: socket.socket) -> dict[str, Any] | None:
        self.asking.remove(link)
        asked = _received(link)
        if asked is None:
            self.chooser.unregister(link)
            link.close()
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self.chooser.close()
            for other in (self.listening, self.waker, self.woken, link, *self.asking, *self.running.values()):
                other.close()
            return asked
        for file in asked["files"]:
            os.close(file)
        self.running[pid] = link
        return None

    def forward(self, link: socket.socket) -> None:
        pid = next((pid for pid, other in self.running.items() if other is link), None)
        if pid is None:  # it has ended in this very moment
            return
        said = _received_bytes(link, 1)
        os.kill(pid, said[0] if said else signal.SIGKILL)
        if not said:  # the client was killed, and so is what it stands for
            self.chooser.unregister(link)

    def reap(self) -> None:
        with suppress(BlockingIOError):
            self.woken.recv(4096)
        for pid, link in list(self.running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.running[pid]
                _send(link, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
                if link in self.chooser.get_map():
                    self.chooser.unregister(link)
                link.close()


def _send(link: socket.socket, content: bytes) -> None:
    with suppress(OSError):  # the client is gone
        link.sendall(content)


def _received(link: socket.socket) -> dict[str, Any] | None:
    """Returns a client's request, or None if the client ended or became a real interpreter."""
    try:
        header, files, _, _ = socket.recv_fds(link, 8, 3)
    except OSError:
        return None
    size = int.from_bytes(header, "little")
    content = _received_bytes(link, size)
    if not files or len(content) < size:
        for file in files:
            os.close(file)
        return None
    return {**marshal.loads(content), "files": files}


def _received_bytes(link: socket.socket, size: int) -> bytes:
    """Returns fewer bytes if the other side ends first."""
    content = b""
    with suppress(OSError):
        while len(content) < size and (part := link.recv(size - len(content))):
            content += part
    return content


def become(asked: dict[str, Any]) -> None:
    """Gives this process what the client's process has inherited."""
    for number, file in enumerate(asked["files"]):
        os.dup2(file, number)
    os.closerange(3, max(asked["files"]) + 1)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.umask(asked["umask"])
    os.sched_setaffinity(0, asked["cores"])
    for name, limit in asked["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    direct = asked["unbuffered"]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            encoding="utf-8",
            errors=errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=direct,
        )
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.executable = asked["executable"]
    kind, what, rest = asked["program"]
    sys.argv = [what if kind == "script" else kind, *rest]
    beside = {"script": str(Path(what).resolve().parent), "-m": str(Path.cwd())}
    sys.path.insert(0, beside.get(kind, ""))


def run(kind: str, what: str) -> None:
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    name, text = "<string>", what
    if kind == "script":
        name, text = what, Path(what).read_text(encoding="utf-8")
        main.__dict__["__file__"] = what
    exec(compile(text, name, "exec"), main.__dict__)


def code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def run_to_the_end(kind: str, what: str) -> None:
    """Ends like an interpreter, but does not tear modules down: that would copy each of their pages."""
    code = 0
    try:
        run(kind, what)
    except SystemExit as error:
        code = code_of(error)
    except BaseException as error:
        while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    del sys.path[0]
    groups = imported()
    gc.collect()
    gc.freeze()
    asked = Server(sys.argv[1]).serve()
    for group in groups:
        group.hide()
    become(asked)
    run_to_the_end(*asked["program"][:2])

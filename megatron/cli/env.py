"""tools/env.py, megatron-env: describes this installation, and reports problems that prevent a training."""

import argparse
import contextlib
import getpass
import importlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron.errors import ConfigError
from megatron.utils.command_line import Parser, run_tool
from megatron.utils.log import print_line
from megatron.utils.memory_limit import memory_limit
from megatron.version import __version__

NAME = "env.py"
OLDEST_TORCH = (2, 10)
PYTHONS = ((3, 11), (3, 13))
HERE = Path(__file__).resolve().parents[1]
OPTIONAL = (
    "transformers accelerate gigatoken orjson sentencepiece tiktoken pyarrow zstandard nltk matplotlib wandb apex"
)
Rows = Iterable[tuple[str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _report(build_parser().parse_known_flags(argv)))


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="Prints what a bug report needs: versions, devices, kernels, conflicts.")
    parser.add_argument("--share", action="store_true", help="omit paths, user and host names")
    return parser


def _report(arguments: argparse.Namespace) -> None:
    """Prints the sections; raises the first problem at the end, when all else has been printed."""
    hidden = without_private if arguments.share else str
    problems: list[str] = []
    for section in (_program, _torch, _packages, _conflicts, _room):
        for name, value in section(problems.append):
            print_line(hidden(f"{name:<22} {value}"))
    if problems:
        raise ConfigError(hidden(problems[0]))
    print_line("a training can start here")


def _program(problem: Callable[[str], None]) -> Rows:
    yield "megatron", f"{__version__} in {HERE}"
    yield "python", f"{platform.python_version()} at {sys.executable}"
    yield (
        "system",
        f"{platform.system()} {platform.release()}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    )
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        problem(f"Python {platform.python_version()}: not supported; use Python 3.11 to 3.13")


def _torch(problem: Callable[[str], None]) -> Rows:
    fix = "install one: bash examples/quickstart.sh in a checkout, or python -m pip install torch"
    try:
        import torch
    except Exception as error:  # a broken library may raise any exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        yield "torch", f"does not import: {reason}"
        problem(f"torch: does not import ({reason}); {fix}")
        return
    yield "torch", f"{torch.__version__}, {_source(torch.__version__, torch.version.cuda, torch.version.hip)}"
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < OLDEST_TORCH:
        problem(f"torch {torch.__version__}: too old, 2.10 or newer is needed; {fix}")
        return
    yield from _devices_and_kernels(problem)


def _source(name: str, cuda: str | None, hip: str | None) -> str:
    """Describes the origin of torch version `name` (wheel or build) and the devices that it was built for."""
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    try:
        known = version("torch")
    except PackageNotFoundError:
        return f"built for {built}, no wheel (a build on the import path)"
    vendor = re.search(r"\d(a|b|rc)\d|\.nv|git", name) is not None
    return f"{'vendor build' if vendor else 'wheel'} {known}, built for {built}"


def _devices_and_kernels(problem: Callable[[str], None]) -> Rows:
    import torch

    from megatron.ops.library import library
    from megatron.ops.select import resolve
    from megatron.utils.device import device_name

    kind, found = "cpu", 0
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        kind, found = accelerator.type, torch.accelerator.device_count()
    names = [device_name(torch.device(kind, index)) for index in range(found)]
    yield "devices", f"{found} accelerators{''.join(f', {name}' for name in names)}" if found else "CPU only"
    native = library()
    yield "kernels found", native.missing or f"built{'' if native.without_cuda is None else ', without CUDA'}"
    for choice in resolve("auto", kind, native=native, warn=lambda _: None).choices:
        yield f"  {choice.op}", f"{choice.backend} ({choice.reason})"
    try:
        importlib.import_module("megatron.training.assemble")
    except ImportError as error:
        problem(f"megatron.training: does not import ({error}); python -m pip install -r requirements.txt")


def _packages(problem: Callable[[str], None]) -> Rows:
    for name in OPTIONAL.split():
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _conflicts(problem: Callable[[str], None]) -> Rows:
    """Yields other folders of the namespace `megatron`. A folder that Python searches first hides our packages."""
    ours = {path.stem for path in HERE.iterdir() if path.name[0] not in "_."}
    folders = [Path(path).resolve() for path in sys.modules["megatron"].__path__]
    for folder in (folder for folder in folders if folder != HERE and folder.is_dir()):
        both = sorted(ours & {path.stem for path in folder.iterdir()})
        first = both and folders.index(folder) < folders.index(HERE)
        yield (
            "also megatron",
            f"{folder}, {'hides ours: ' if first else 'hidden: ' if both else 'no conflict'}{', '.join(both)}",
        )
        if first:
            problem(
                f"{folder}: hides megatron.{both[0]} of {HERE}; remove that folder from PYTHONPATH, or "
                "uninstall that package"
            )


def _room(problem: Callable[[str], None]) -> Rows:
    yield "memory", f"{(memory_limit() or 0) / 2**30:.1f} GiB with swap"
    yield "free disk", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB in {Path.cwd()}"


def without_private(text: str) -> str:
    """Replaces absolute paths, the user name and the host name."""
    text = re.sub(r"(?<![\w.])(/[^\s/,;:()'\"]+)+/?", "<path>", text)
    names = [socket.gethostname(), socket.gethostname().partition(".")[0]]
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        names.append(getpass.getuser())
    return re.sub("|".join(rf"\b{re.escape(name)}\b" for name in names if name) or r"(?!)", "<name>", text)

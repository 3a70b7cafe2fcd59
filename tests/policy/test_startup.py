"""Modules that a command loads before it does anything: `--help` answers at once, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_anywhere
from tests.helpers.warm import warm_python
from tests.policy import rules
from tests.policy.rules import ROOT

# Fails the process as soon as anything imports torch.
NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'torch':
            raise ImportError('torch was imported')
sys.meta_path.insert(0, Refuse())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "megatron",
        "megatron.config",
        "megatron.layout",
        "megatron.data",
        "megatron.tokenizer",
        "megatron.errors",
        "megatron.training.hooks",
        "megatron.utils.device_kind",
        "megatron.pretrain",
        "megatron.compat",
        "megatron.compat.deepspeed_file.source",
        "megatron.interop.source",
        "megatron.checkpoint.step_source",
    ],
)
def test_importing_loads_no_torch(module: str) -> None:
    done = python(NO_TORCH + f"import {module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["megatron.training.assemble", "megatron.compat.any_model"])
def test_a_training_loads_what_divides_weights_only_for_it(module: str) -> None:
    """torch's fully_shard takes a third of a second to import."""
    done = python(f"import sys, {module}; print([name for name in sys.modules if 'fsdp' in name or 'sympy' == name])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# setup_environment.py runs before anything is installed.
TOOLS = sorted({path.name for path in (ROOT / "tools").glob("*.py")} - {"setup_environment.py"})


@pytest.mark.parametrize("script", ["pretrain_gpt.py", *(f"tools/{name}" for name in TOOLS)])
def test_help_loads_no_torch(script: str) -> None:
    run = NO_TORCH + "import runpy; sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], "
    done = python(run + "run_name='__main__')", script, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower() or "--help-all" in done.stdout


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_every_benchmark_answers_help_from_anywhere(script: Path, tmp_path: Path) -> None:
    command = [warm_python(), str(script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and ("usage" in done.stdout or "--help-all" in done.stdout), done.stderr


@pytest.mark.parametrize("place", ["on the path", "installed"])
@pytest.mark.parametrize("program", ["pretrain_gpt.py", "tools/generate.py", "tools/checkpoint_util.py"])
def test_another_package_of_the_name_is_one_line(program: str, place: str, tmp_path: Path) -> None:
    """A package later on the path hides this checkout all the same. None of its code is executed."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("import no_such_dependency")
    path = str(tmp_path)
    start = f"import sys, runpy; sys.path.append({path!r}); sys.argv = [{program!r}, '--help']; "
    code = start + f"runpy.run_path({program!r}, run_name='__main__')"
    command = [sys.executable, program, "--help"] if place == "on the path" else [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": path if place == "on the path" else ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    hides = f"error: {tmp_path}/megatron/__init__.py: another package megatron hides this one; take its folder from "
    assert done.returncode == 2 and done.stderr.startswith(hides) and done.stderr.count("\n") == 1, done.stderr


def test_the_guard_knows_every_part() -> None:
    assert set(megatron_anywhere.PARTS) == rules.LEVELS.keys()


def test_the_guard_sees_torch() -> None:
    assert "torch was imported" in python(NO_TORCH + "import torch").stderr

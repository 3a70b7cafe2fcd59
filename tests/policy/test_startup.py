"""What a command loads before it has anything to do: `--help` answers at once, and needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    ],
)
def test_importing_loads_no_torch(module: str) -> None:
    done = python(NO_TORCH + f"import {module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "tools/preprocess_data.py", "tools/train_tokenizer.py"])
def test_help_loads_no_torch(script: str) -> None:
    run = NO_TORCH + "import runpy; sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], "
    done = python(run + "run_name='__main__')", script, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize("script", ["generate", "convert_checkpoint", "make_stdlib_corpus", "plot_loss"])
def test_every_tool_answers_help(script: str) -> None:
    command = [sys.executable, f"tools/{script}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_guard_sees_torch() -> None:
    assert "torch was imported" in python(NO_TORCH + "import torch").stderr

"""tools/env.py: what a bug report needs, and what keeps a training from starting."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli import env as env_module

ROOT = Path(__file__).resolve().parents[3]


def env(*flags: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [sys.executable, str(ROOT / "tools" / "env.py"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_describes_this_environment() -> None:
    import torch

    done = env()
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:-1])
    assert str(ROOT) in rows["megatron"] and sys.executable in rows["python"]
    assert rows["torch"].startswith(torch.__version__) and "built for" in rows["torch"]
    assert {"devices", "attention", "adamw", "transformers", "wandb", "memory"} <= rows.keys()
    assert "kernels found" in done.stdout and "free disk" in done.stdout
    assert done.stdout.splitlines()[-1] == "a training can start here"


def test_what_is_shared_names_no_place_and_nobody() -> None:
    done = env("--share")
    assert done.returncode == 0, done.stderr
    for private in (str(ROOT), str(Path.home()), sys.prefix, getpass.getuser(), socket.gethostname()):
        assert private not in done.stdout, private
    assert "/" not in done.stdout.replace("<path>", ""), "no path is left"


@pytest.mark.parametrize("error", [KeyError("no such user"), OSError("no such user")])
def test_a_user_without_a_name_hides_the_rest(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may run with a number that /etc/passwd lacks."""

    def nobody() -> str:
        raise error

    monkeypatch.setattr(env_module.getpass, "getuser", nobody)
    monkeypatch.setattr(env_module.socket, "gethostname", lambda: "node7.cluster")
    assert env_module.without_private("node7 in /data/x, wheel") == "<name> in <path>, wheel"
    monkeypatch.setattr(env_module.socket, "gethostname", lambda: "")
    assert env_module.without_private("node7 in /data/x") == "node7 in <path>"


@pytest.mark.parametrize("flags", [[], ["--share"]])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", ("libcudart.so.13", "does not import")),
        ("__version__ = '2.4.1'\nclass version: cuda = hip = None", ("2.4.1", "too old", "2.10 or newer")),
    ],
)
def test_a_torch_that_cannot_train_is_exit_code_2_with_the_fix(
    flags: list[str], body: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(body)
    done = env(*flags, path=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words) and "bash examples/quickstart.sh" in done.stderr
    assert "free disk" in done.stdout, "the rest is printed all the same"


def test_another_megatron_on_the_path_is_named(tmp_path: Path) -> None:
    """A folder that is searched after ours hides nothing; one before it hides ours."""
    other = tmp_path / "megatron"
    (other / "core").mkdir(parents=True)
    done = env(path=tmp_path)
    assert done.returncode == 0 and f"{other}, no conflict" in done.stdout, done.stdout + done.stderr
    (other / "training").mkdir()
    assert f"{other}, hidden: training" in env(path=tmp_path).stdout
    paths = [str(tmp_path), str(ROOT)]
    code = f"import sys; sys.path[:0] = {paths}; from megatron.cli.env import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "hides megatron.training" in done.stderr and "PYTHONPATH" in done.stderr

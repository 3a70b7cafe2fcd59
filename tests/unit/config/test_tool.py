"""What the tools' command lines share: one line for a mistake, whatever the tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.tool import run_tool

ROOT = Path(__file__).resolve().parents[3]
TOOLS = (
    "preprocess_data",
    "train_tokenizer",
    "convert_checkpoint",
    "generate",
    "verify_checkpoint",
    "plot_loss",
    "make_stdlib_corpus",
)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("flags", [[], ["--no-such-flag"]], ids=["nothing", "unknown"])
def test_a_wrong_command_is_one_line(tool: str, flags: list[str]) -> None:
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and done.stderr.split(":")[0] in ("error", f"{tool}.py")
    assert not flags or "--no-such-flag: no such flag" in done.stderr


def test_a_missing_dependency_is_one_line_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    def needs(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert run_tool("error", lambda: needs("torch.nn")) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: torch is not installed for ") and line.count("\n") == 1
    assert "examples/quickstart.sh" in line and "pip install -r requirements.txt" in line
    with pytest.raises(ModuleNotFoundError):  # a mistake of ours keeps its traceback
        run_tool("error", lambda: needs("megatron.nowhere"))


def test_the_job_may_give_the_exit_code() -> None:
    assert run_tool("error", lambda: None) == 0
    assert run_tool("error", lambda: 4) == 4

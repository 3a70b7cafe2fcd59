"""Lines of several ranks on one terminal are not mixed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.utils.command_line import run_tool
from megatron.utils.log import RankLog, print_line
from tests.helpers.runs import REPOSITORY, launch

LINES = 500
PROGRAM = f"""
import os, sys; sys.path.insert(0, {str(REPOSITORY)!r})
from megatron.utils.log import RankLog, print_line
for number in range({LINES}):
    RankLog().info(f"rank {{os.environ['RANK']}} logs {{number}}")
    print_line(f"rank {{os.environ['RANK']}} prints {{number}}", sys.stdout)
"""


class Writes(io.StringIO):
    """A stream that keeps what each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, text: str) -> int:
        self.calls.append(text)
        return super().write(text)


def test_a_line_is_one_write() -> None:
    stream = Writes()
    print_line("one line", stream)
    RankLog(stream=stream).info("two", "lines")
    print("a line", file=stream)
    assert stream.calls == ["one line\n", "two\nlines\n", "a line", "\n"], (
        "print needs two, and so is not used for this"
    )


def test_a_line_stays_one_whatever_it_quotes() -> None:
    stream = io.StringIO()
    log = RankLog(stream=stream)
    for say in (log.info, log.warn, lambda text: print_line(text, stream)):
        say("--load a\nerror: \x1b[31m\u202e" + "b" * 1000)
    *lines, end = stream.getvalue().split("\n")
    assert len(lines) == 3 and not end
    assert all("--load a\\nerror: \\x1b[31m\\u202ebbb" in line and line.endswith(" characters)") for line in lines)


def test_a_long_line_of_the_log_is_whole_and_a_warning_is_not() -> None:
    stream = io.StringIO()
    log = RankLog(stream=stream)
    log.info("rank 7: 1.00, " * 1000)
    log.warn("many words " * 1000)
    times, warning = stream.getvalue().splitlines()
    assert len(times) == 14_000 and len(warning) < 2100


def test_an_error_of_a_command_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise ConfigError("--split 1: two numbers are needed")

    stream = Writes()
    monkeypatch.setattr("sys.stderr", stream)
    assert run_tool("tool", refused) == ConfigError.exit_code
    assert stream.calls == ["tool: --split 1: two numbers are needed\n"]


def test_ranks_under_torchrun_do_not_break_into_the_lines_of_others(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch([], ranks=2, script=tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    expected = [f"rank {rank} {verb} {n}" for rank in (0, 1) for verb in ("logs", "prints") for n in range(LINES)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_stream_that_cannot_encode_a_path_ends_no_run(encoding: str, errors: str) -> None:
    kept = io.BytesIO()
    stream = io.TextIOWrapper(kept, encoding=encoding, errors=errors)
    RankLog(stream=stream).info("saved to caf\udce9/ü😀")
    shown = "ü😀" if encoding == "utf-8" else "\\xfc\\U0001f600"
    assert kept.getvalue().decode(encoding) == f"saved to caf\\udce9/{shown}\n"


def test_a_tool_prints_names_that_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(kept, encoding="ascii"))
    assert run_tool("error", lambda: print("caf\udce9 ü")) == 0
    assert kept.getvalue() == b"caf\\udce9 \\xfc\n"


def test_a_path_that_no_file_system_takes_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("error", lambda: print(Path("x" * 5000).is_file())) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: xxx") and line.endswith("(5000 characters): File name too long; name another path\n")


def test_a_warning_is_one_line_whatever_it_quotes() -> None:
    stream = io.StringIO()
    RankLog(0, stream).warn(f"--path {'x' * 100_000}\x1b[2J\nsecond: is odd")
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue() and len(stream.getvalue()) < 2100

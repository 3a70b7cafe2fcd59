"""The shared command line: every tool reports a mistake in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.cli import convert_checkpoint, evaluate, generate, preprocess_data, train_tokenizer
from megatron.errors import ConfigError
from megatron.utils import command_line, nearest_flag
from megatron.utils.command_line import Parser, integer, number, run_tool

ROOT = Path(__file__).resolve().parents[3]
SETUP = [ROOT / "tools" / "setup_environment.py"]  # before there is anything to import
TOOLS = (
    "preprocess_data",
    "train_tokenizer",
    "convert_checkpoint",
    "generate",
    "verify_checkpoint",
    "plot_loss",
    "results_table",
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


@pytest.mark.parametrize(
    ("parser", "typed", "flag"),
    [
        (preprocess_data.build_parser, "--tokenizer_name", "--tokenizer-model"),
        (preprocess_data.build_parser, "--text_column", "--json-keys"),
        (train_tokenizer.build_parser, "--text_column", "--json-key"),
        (convert_checkpoint.parser, "--torch_dtype", "--dtype"),
        (convert_checkpoint.parser, "--output_dir", "--save"),
        (evaluate.parser, "--model", "--load"),
        (evaluate.parser, "--tasks", "--task"),
        (generate.parser, "--model_name_or_path", "--load"),
        (generate.parser, "--max_length", "--max-new-tokens"),
    ],
)
def test_a_name_of_another_program(parser: Callable[[], Parser], typed: str, flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parser().parse_known_flags([typed, "x"])
    assert str(raised.value) == f"{typed}: no such flag; use {flag} instead"


def test_every_name_of_another_program_belongs_to_a_tool() -> None:
    makers = (preprocess_data.build_parser, train_tokenizer.build_parser, convert_checkpoint.parser)
    parsers = [make() for make in (*makers, evaluate.parser, generate.parser)]
    known = [parser._option_string_actions.keys() for parser in parsers]
    assert all(any(flag in flags for flags in known) for flag in nearest_flag._ELSEWHERE)


@pytest.mark.parametrize(("typed", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_dtypes_are_accepted(typed: str, dtype: str) -> None:
    converting = ["--load", "a", "--to", "hf", "--save", "b", "--dtype", typed]
    assert convert_checkpoint.parser().parse_known_flags(converting).dtype == dtype
    assert evaluate.parser().parse_known_flags(["--load", "a", "--data", "b", "--dtype", typed]).dtype == dtype


def test_a_missing_dependency_is_one_line_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    def needs(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert run_tool("error", lambda: needs("torch.nn")) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: torch is not installed for ") and line.count("\n") == 1
    assert "examples/quickstart.sh" in line and "pip install -r requirements.txt" in line
    with pytest.raises(ModuleNotFoundError):  # our own bugs keep their traceback
        run_tool("error", lambda: needs("megatron.nowhere"))


def test_an_environment_that_was_not_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    monkeypatch.setattr(command_line, "__file__", str(tmp_path / "megatron" / "utils" / "command_line.py"))

    def needs_torch() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    assert run_tool("error", needs_torch) == 2
    assert capsys.readouterr().err.endswith(f"; source {tmp_path}/.venv/bin/activate\n")


@pytest.mark.parametrize(
    "tool", [tool for tool in TOOLS if tool not in ("plot_loss", "results_table", "make_stdlib_corpus")]
)
def test_a_tool_in_a_python_without_torch_and_numpy(tool: str, tmp_path: Path) -> None:
    for name in ("torch", "numpy"):  # as if it were not there
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')")
    (tmp_path / "in.json").write_text("")
    flags = {
        "preprocess_data": ["--input", "in.json", "--output-prefix", "o", "--tokenizer-type", "GPT2BPETokenizer"],
        "train_tokenizer": ["--input", "in.json", "--output-dir", "o", "--vocab-size", "300"],
        "convert_checkpoint": ["--load", ".", "--to", "hf", "--save", "o"],
        "generate": ["--load", ".", "--prompt", "x"],
        "verify_checkpoint": ["."],
    }[tool]
    flags += ["--vocab-file", "in.json", "--merge-file", "in.json"] * (tool == "preprocess_data")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *flags],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "is not installed for" in done.stderr and "pip install -r requirements.txt" in done.stderr


def test_an_older_python_is_refused_in_one_line() -> None:
    code = "import sys; sys.version_info = (3, 10, 13); import megatron.cli"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "use Python 3.11 to 3.13" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("tool", sorted(path.stem for path in (ROOT / "tools").glob("*.py") if path not in SETUP))
def test_a_reader_that_has_gone_is_no_error(tool: str) -> None:
    """`... | head` closes the pipe like this."""
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--help"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 141)


def test_a_reader_that_goes_away_in_the_middle() -> None:
    job = "lambda: print(*range(10**6), sep=chr(10))"
    code = f"from megatron.utils.command_line import run_tool; raise SystemExit(run_tool('x', {job}))"
    shell = f"set -o pipefail; '{sys.executable}' -c \"{code}\" | head -2"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n1\n", "", 141)


def test_another_broken_pipe_is_an_error() -> None:
    def worker_is_gone() -> int:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        run_tool("x", worker_is_gone)


def test_the_job_may_give_the_exit_code() -> None:
    assert run_tool("error", lambda: None) == 0
    assert run_tool("error", lambda: 4) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "is not a whole number") for text in ("3_2", "٣٢", "2.0", "0x3", "", "1e2", "two")),
        ("0", "0 is less than 1"),
        ("10", "10 is more than 9"),
        ("1" * 5000, "is out of range; give a whole number from 1 to 9"),
    ],
)
def test_whole_numbers_of_tools(text: str, said: str) -> None:
    parser = Parser()
    parser.add_argument("--n", type=integer(1, 9))
    assert parser.parse_known_flags(["--n", "+009"]).n == 9
    with pytest.raises(ConfigError, match=said):
        parser.parse_known_flags([f"--n={text}"])


@pytest.mark.parametrize("text", ["1_0.5", "٣.٢", "nan", "inf", "1e999", "1e-999", "0x1p3"])
def test_numbers_of_tools(text: str) -> None:
    parser = Parser()
    parser.add_argument("--x", type=number)
    assert parser.parse_known_flags(["--x", "-.5"]).x == -0.5
    with pytest.raises(ConfigError, match=r"is not a (finite )?number|is out of range"):
        parser.parse_known_flags([f"--x={text}"])


@pytest.mark.parametrize("given", ["", "  "])
def test_an_empty_path_is_not_the_current_folder(given: str) -> None:
    parser = Parser()
    parser.add_argument("--output", type=Path)
    with pytest.raises(ConfigError, match=r"--output: the path is empty"):
        parser.parse_known_flags(["--output", given])
    assert parser.parse_known_flags(["--output", "a"]).output == Path("a")

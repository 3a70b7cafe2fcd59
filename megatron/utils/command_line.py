"""Command lines of tools/: the argument parser, one-line errors, exit codes, a closed stdout."""

import argparse
import dataclasses
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from megatron.commands import as_typed_here
from megatron.errors import ConfigError, InterruptError, MegatronError
from megatron.utils.help import Help, HelpEntry, more
from megatron.utils.loading import before_torch
from megatron.utils.log import escape_unprintable, print_line, print_lines
from megatron.utils.nearest_flag import named_elsewhere, nearest_flag
from megatron.utils.numerals import LARGEST, real_number, whole_number

DEPENDENCIES = (
    *("numpy", "orjson", "regex", "safetensors", "tokenizers", "torch", "tqdm", "transformers", "xxhash", "yaml"),
)
_STDOUT = 1
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors for paths that no file system accepts."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError and takes no abbreviations.

    With a `first_screen`, --help prints that; --help WORD and --help-all print the flags.
    """

    def __init__(self, first_screen: str = "", *, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog=prog and as_typed_here(prog), allow_abbrev=False, add_help=not first_screen, **options)
        self._first_screen = as_typed_here(first_screen)
        self.register("action", None, _Once)
        self.register("type", Path, _path)

    def format_help(self) -> str:
        return as_typed_here(super().format_help())

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].lower()}{message[1:]}; see --help".removeprefix("argument "))

    def parse_known_flags(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        argv = sys.argv[1:] if argv is None else argv
        if self._first_screen and (text := self._help().answer(argv)) is not None:
            raise SystemExit(print_help(text))
        for word in argv:  # before parsing: a misspelt required flag would be reported as missing
            if word.startswith("--") and word.split("=", 1)[0] not in self._option_string_actions:
                self._refuse(word)
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            self._refuse(unknown[0])
        return namespace

    def _help(self) -> Help:
        groups = [group for group in self._action_groups if group._group_actions]
        listed = [_entry(str(group.title), action) for group in groups for action in group._group_actions]
        first = self._first_screen + more(self.prog, (str(group.title) for group in groups))
        return Help(first, tuple(listed))

    def _refuse(self, word: str) -> NoReturn:
        flag = word.split("=", 1)[0]
        known = list(self._option_string_actions)
        elsewhere, near = named_elsewhere(flag, known), nearest_flag(flag, known)
        hint = f"use {elsewhere} instead" if elsewhere else f"did you mean {near}?" if near else "see --help"
        raise ConfigError(f"{flag}: no such flag; {hint}" if flag.startswith("-") else f"{word}: not a flag; {hint}")


def _entry(section: str, action: argparse.Action) -> HelpEntry:
    several = " ..." if action.nargs in ("+", "*") else ""
    named = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar or action.dest.upper()
    marks = " [required]" if action.required else ""
    value = "" if action.nargs == 0 else f"{named}{several}"
    return HelpEntry(section, tuple(action.option_strings), value, f"{action.help or ''}{marks}".strip())


class _Once(argparse.Action):
    """Stores a value and rejects a flag given twice."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            raise ConfigError(f"{option_string}: given twice; give it once")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def fields_from(arguments: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Values of the flags that are named like a dataclass's fields; lists become tuples."""
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(kind) if hasattr(arguments, f.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def dtype_name(text: str) -> str:
    """The `type` of --dtype. Returns the long name of a short one."""
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(text, text)


def integer(at_least: int, at_most: int = LARGEST) -> Callable[[str], int]:
    """The `type` of a flag that takes a whole number within these bounds."""

    def parse(text: str) -> int:
        try:
            value = whole_number(text)
        except ValueError as error:
            limit = "" if "whole" in str(error) else f"; give a whole number from {at_least} to {at_most}"
            raise argparse.ArgumentTypeError(f"{text!r} is {error}{limit}") from None
        if value < at_least:
            raise argparse.ArgumentTypeError(f"{value} is less than {at_least}")
        if value > at_most:
            raise argparse.ArgumentTypeError(f"{value} is more than {at_most}")
        return value

    return parse


def number(text: str) -> float:
    """The `type` of a flag that takes a finite number."""
    try:
        return real_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is {error}") from None


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the path is empty (an unset shell variable?); give a path, or remove the flag"
        )
    return Path(text)


def fraction(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return value


def run_tool(name: str, job: Callable[[], int | None]) -> int:
    """Runs a tool and returns its exit code. A MegatronError or a missing dependency becomes one line.

    If the reader of stdout has gone (`| head`), the tool ends silently, with the exit code of a program killed by
    SIGPIPE.
    """
    escape_unprintable(sys.stdout)
    try:
        try:
            return _exit_code(as_typed_here(name), job)
        finally:  # also after SystemExit of --help: a failing flush at interpreter exit would print a traceback
            sys.stdout.flush()
    except BrokenPipeError:
        if not stdout_is_unread():
            raise
        forget_stdout()
        return 128 + signal.SIGPIPE


def print_help(text: str) -> int:
    """Prints the text and returns the exit code: 0, or 141 if the reader of stdout has gone (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        forget_stdout()
        return 128 + signal.SIGPIPE
    return 0


def stdout_is_unread() -> bool:
    """True if the reader of stdout has closed it."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def forget_stdout() -> None:
    """Redirects stdout to /dev/null, so that the final flush of the interpreter does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)


def _exit_code(name: str, job: Callable[[], int | None]) -> int:
    try:
        return job() or 0
    except KeyboardInterrupt:
        print_line(f"{name}: interrupted; unfinished outputs were not written", sys.stderr)
        return InterruptError.exit_code
    except Exception as error:
        told = error if isinstance(error, MegatronError) else explained(error)
        if told is None:
            raise
        print_lines([f"{name}: {line}" for line in told.lines], sys.stderr)
        return told.exit_code


def run_tool_module(module: str) -> int:
    """Imports a tool's module and runs its `main()`; a dependency that is missing at import becomes one line, too."""
    before_torch()
    return run_tool("error", lambda: import_module(module).main())


def explained(error: BaseException) -> MegatronError | None:
    """Returns the one-line error for an invalid path or a missing dependency; None for any other exception."""
    if isinstance(error, OSError) and error.errno in _NO_PATH:
        return ConfigError(f"{error.filename}: {error.strerror}; name another path")
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module not in DEPENDENCIES:
        return None
    environment = Path(__file__).resolve().parents[2] / ".venv"
    if (environment / "bin" / "python").exists() and Path(sys.prefix).resolve() != environment:
        return ConfigError(f"{module} is not installed for {sys.executable}; source {environment}/bin/activate")
    return ConfigError(
        f"{module} is not installed for {sys.executable}; bash examples/quickstart.sh makes a .venv that has "
        f"everything, or: {sys.executable} -m pip install -r requirements.txt"
    )

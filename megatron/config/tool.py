"""What the command lines of the tools share: errors of one line that name the flag, and the nearest known one."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from megatron.errors import ConfigError, InterruptError, MegatronError

DEPENDENCIES = ("numpy", "regex", "safetensors", "tokenizers", "torch", "transformers", "yaml")
_STDOUT = 1


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are ConfigErrors, and which takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].lower()}{message[1:]}; see --help".removeprefix("argument "))

    def parse_known_flags(self, argv: Sequence[str]) -> argparse.Namespace:
        for word in argv:  # first, since a misspelt flag is often also a missing one
            if word.startswith("--") and word.split("=", 1)[0] not in self._option_string_actions:
                self._refuse(word)
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            self._refuse(unknown[0])
        return namespace

    def _refuse(self, word: str) -> NoReturn:
        flag = word.split("=", 1)[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise ConfigError(f"{flag}: no such flag; {hint}" if flag.startswith("-") else f"{word}: not a flag; {hint}")


class _Once(argparse.Action):
    """Stores a value; a flag given twice is refused rather than half ignored."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            raise ConfigError(f"{option_string}: given twice; give it once")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def integer(at_least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < at_least:
            raise argparse.ArgumentTypeError(f"{value} is less than {at_least}")
        return value

    return parse


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return value


def run_tool(name: str, job: Callable[[], int | None]) -> int:
    """The exit code; a MegatronError becomes one line, and so does a Python without our dependencies.

    Whose reader has gone (`| head`) ends without a word, with the code of a program that SIGPIPE ended.
    """
    try:
        try:
            return _exit_code(name, job)
        finally:  # --help leaves by SystemExit; what is written at Python's very end cannot fail quietly
            sys.stdout.flush()
    except BrokenPipeError:
        if not stdout_is_unread():
            raise
        forget_stdout()
        return 128 + signal.SIGPIPE


def stdout_is_unread() -> bool:
    """Whether its reader has gone."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def forget_stdout() -> None:
    """What is still to be written goes nowhere, instead of failing at Python's very end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)


def _exit_code(name: str, job: Callable[[], int | None]) -> int:
    try:
        code = job()
    except MegatronError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted; nothing was written", file=sys.stderr)
        return InterruptError.exit_code
    except ModuleNotFoundError as error:
        line = not_installed(error)
        if line is None:
            raise
        print(f"{name}: {line}", file=sys.stderr)
        return ConfigError.exit_code
    return code or 0


def start(module: str) -> int:
    """The exit code of a tool: `main()` of its module, whose very import may need what this Python does not have."""
    return run_tool("error", lambda: import_module(module).main())


def not_installed(error: ModuleNotFoundError) -> str | None:
    """The line for a Python that lacks one of our dependencies; None where it is a module of somebody else's."""
    module = (error.name or "").partition(".")[0]
    if module not in DEPENDENCIES:
        return None
    return (
        f"{module} is not installed for {sys.executable}; bash examples/quickstart.sh makes a .venv that has "
        f"everything, or: {sys.executable} -m pip install -r requirements.txt"
    )

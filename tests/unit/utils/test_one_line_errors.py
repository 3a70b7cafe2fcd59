"""The hook for uncaught errors of a user's own program."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch.multiprocessing import ProcessRaisedException

from megatron.errors import ConfigError, ConfigErrors
from megatron.utils.one_line_errors import install


def uncaught(code: str, names: dict[str, Any]) -> None:
    try:
        exec(compile(code, "/some/where/train.py", "exec"), names)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


def test_errors_of_ours_are_lines_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    install.__wrapped__()
    two = ConfigErrors([ConfigError("--a 1: no; give 2"), ConfigError("--b 1: no; give 3")])
    uncaught("x = 1\n\nraise error", {"error": two})
    assert capsys.readouterr().err.splitlines() == [
        "error: train.py:3: --a 1: no; give 2",
        "error: train.py:3: --b 1: no; give 3",
    ]
    assert not others
    message = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  ...\n"
    spawned = ProcessRaisedException(f"{message}megatron.errors.ConfigError: OSS: no: give 2\n", 1, 99)
    uncaught("raise error", {"error": spawned})
    assert capsys.readouterr().err == "error: process 1: OSS: no: give 2\n" and not others
    uncaught("raise error", {"error": ProcessRaisedException(f"{message}ValueError: no", 1, 99)})
    uncaught("1 / 0", {})
    assert [type(one) for one in others] == [ProcessRaisedException, ZeroDivisionError]
    assert capsys.readouterr().err == ""


def test_the_line_is_the_users_own_and_not_the_librarys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch calls the user's code back within a backward pass."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    install.__wrapped__()
    code = """import torch
def refuse(grad):
    raise error

x = torch.ones(1, requires_grad=True)
x.register_hook(refuse)
x.sum().backward()
"""
    uncaught(code, {"error": ConfigError("no")})
    assert capsys.readouterr().err == "error: train.py:3: no\n"

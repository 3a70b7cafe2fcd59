"""Bytes done, total and time left: a bar on a terminal, lines at an interval elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from megatron.utils import progress
from megatron.utils.progress import ByteProgress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_at_their_interval(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    shown = ByteProgress("merged")
    for done in range(1, 5):
        shown.show(done * 10**9, 4 * 10**9)
    said = capsys.readouterr().err.splitlines()
    assert said == ["merged 2.00 of 4.00 GB (333 MB/s, 0:00:06 left)"]


def test_a_terminal_gets_a_bar_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown = ByteProgress("converted")
    shown.show(500, 1000)
    assert "converted" in terminal.getvalue()
    shown.show(1000, 1000)
    said = terminal.getvalue()
    assert "100%" in said and said.endswith("\n") and "GB" not in said


def test_durations_read_as_hours() -> None:
    assert duration(0) == "0:00:00" and duration(3725.4) == "1:02:05"

"""Error messages can be printed, whatever characters they contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError, ConfigErrors, DataError


def test_a_name_that_is_no_text_is_told_with_its_bytes(tmp_path: Path) -> None:
    name = tmp_path / b"caf\xe9".decode(errors="surrogateescape")
    assert str(DataError(f"{name}: cannot be read")).encode() == f"{tmp_path}/caf\\udce9: cannot be read".encode()


LONG = "x" * 300_000  # twelve minutes for a search that is quadratic


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            f"--save {LONG}: is a file; give a folder",
            f"--save {LONG[:200]}... (300000 characters): is a file; give a folder",
        ),
        ("a\x1b[2Jb\x9bc\x07", r"a\x1b[2Jb\x9bc\x07"),
        ("one\ntwo\r\u2028three", r"one\ntwo\r\u2028three"),
        ("name\u202egnp.exe", r"name\u202egnp.exe"),
        ("Größe 😀 ٣", "Größe 😀 ٣"),
    ],
)
def test_a_message_is_one_line_that_a_terminal_does_not_obey(message: str, shown: str) -> None:
    assert str(ConfigError(message)) == shown == str(ConfigError(shown)), "once is enough"
    assert ConfigErrors([ConfigError(message), ConfigError("b")]).lines == (shown, "b")


def test_a_value_of_many_words_is_cut_and_the_reason_stays() -> None:
    line = str(ConfigError(f"--data-path {'word ' * 20_000}: no such file; check the path"))
    assert len(line) < 2100 and line.startswith("--data-path word word")
    assert line == str(ConfigError(line)), "cut once"
    assert "(100042 characters)" in line and line.endswith(": no such file; check the path")

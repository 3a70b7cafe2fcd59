"""Messages of errors can be printed, whatever they name."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import DataError


def test_a_name_that_is_no_text_is_told_with_its_bytes(tmp_path: Path) -> None:
    name = tmp_path / b"caf\xe9".decode(errors="surrogateescape")
    assert str(DataError(f"{name}: cannot be read")).encode() == f"{tmp_path}/caf\\udce9: cannot be read".encode()

"""docs/from_deepspeed.md has the tables that the table of keys generates."""

from __future__ import annotations

from pathlib import Path

from megatron.compat.deepspeed_file.docs import BEGIN, END, key_tables, with_new_tables
from megatron.compat.deepspeed_file.table import keys_by_path

PAGE = Path(__file__).parents[4] / "docs" / "from_deepspeed.md"


def test_the_page_is_what_the_table_generates() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == with_new_tables(text), "run: python -m megatron.compat.deepspeed_file.docs"


def test_every_key_is_in_it() -> None:
    tables = key_tables()
    missing = [
        key.path for key in keys_by_path().values() if not key.has_rows and f"`{key.path.split('.')[-1]}`" not in tables
    ]
    assert missing == []

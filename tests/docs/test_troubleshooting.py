"""Checks that docs/troubleshooting.md quotes messages as they stand in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.docs.blocks import ROOT, blocks_of

PAGE = "docs/troubleshooting.md"
VALUE = "\0"
"""Stands for a value: `{...}` in an f-string, `<...>` on the page."""


def literals(source: str) -> Iterator[str]:
    """The string literals of a module. The parts of an f-string are joined."""
    inside = set[int]()
    for node in ast.walk(ast.parse(source)):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
            joined = "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
            yield re.sub(f"{VALUE}+", VALUE, joined)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def messages() -> tuple[str, ...]:
    files = sorted((ROOT / "megatron").rglob("*.py"))
    return tuple(text for path in files for text in literals(path.read_text(encoding="utf-8")))


def quotes(page: str) -> list[str]:
    return [line for block in blocks_of(page, PAGE) if block.language == "text" for line in block.text.splitlines()]


def occurs(quote: str) -> bool:
    """True if one literal has the quote, with any values in the places of its values."""
    wanted = re.sub(r"<[^<>]+>", VALUE, quote)
    return any(wanted in text for text in messages())


def test_every_quoted_message_occurs_in_the_code() -> None:
    quoted = quotes((ROOT / PAGE).read_text(encoding="utf-8"))
    assert len(quoted) >= 20
    assert [quote for quote in quoted if not occurs(quote)] == []


def test_a_quote_that_is_not_exact_is_found() -> None:
    assert occurs("warning: <step> is damaged: FALLING BACK to an older step")
    assert not occurs("warning: <step> is broken: FALLING BACK to an older step")
    assert not occurs("warning: the step is damaged: FALLING BACK to an older step"), "a value is marked as one"


def test_literals_are_joined() -> None:
    source = 'f"a {b} c" " d"\nraise E("x" "y")'
    assert list(literals(source)) == [f"a {VALUE} c d", "xy"]


def test_each_entry_says_why_what_to_type_and_how_to_tell_that_it_worked() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    entries = page.split("\n### ")[1:]
    parts = ("- **Why:**", "- **Type:**", "- **It worked when**")
    assert [entry.splitlines()[0] for entry in entries if any(part not in entry for part in parts)] == []

"""docs/api.md: each name's call is the code's signature, and each example runs."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.helpers.checkout import Checkout, copy_checkout

PAGE = ROOT / "docs" / "api.md"
ENTRY = re.compile(r"^### `(?P<name>[\w.]+)`\n\n```text\n(?P<call>[^\n]+)\n```\n(?P<body>.*?)(?=^##|\Z)", re.M | re.S)
ENTRIES = {entry["name"]: entry for entry in ENTRY.finditer(PAGE.read_text(encoding="utf-8"))}


def offered(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def call_of(function: Any, shown: str) -> str:
    """`shown`, the name before the bracket, with the parameters of the function, without their types."""
    given = inspect.signature(function).parameters.values()
    text = str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in given]))
    text = re.sub(r"<function (\w+) at \w+>", r"\1", text)
    return shown + re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", text)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_call_is_the_signature(name: str) -> None:
    """A call that ends with `...` is the signature's beginning."""
    call, function = ENTRIES[name]["call"], offered(name)
    shown = call.split("(")[0]
    whole = call_of(getattr(function, shown.split(".")[1]) if "." in shown else function, shown)
    beginning = call.removesuffix("...)")
    assert whole == call or (beginning != call and whole.startswith(beginning))


def test_every_name_has_an_example_that_uses_it() -> None:
    assert len(ENTRIES) == PAGE.read_text(encoding="utf-8").count("\n### ") >= 20
    examples = {
        name: "".join(re.findall(r"```python\n(.*?)```", entry["body"], re.S)) for name, entry in ENTRIES.items()
    }
    assert [name for name, text in examples.items() if not re.search(rf"\b{name.split('.')[-1]}\b", text)] == []


def test_the_examples_run(tmp_path: Path) -> None:
    """In the page's order and in one folder, as a reader runs them."""
    root, script = copy_checkout(tmp_path).root, []
    for block in blocks_of(PAGE.read_text(encoding="utf-8"), "docs/api.md"):
        example = f"example_{block.line}.py"
        if block.language == "python":
            (root / example).write_text(block.text, encoding="utf-8")
        if block.language in ("python", "bash"):
            script.append(f"python {example}" if block.language == "python" else block.text)
    Checkout(root, warm=True).must_run("\n".join(script))

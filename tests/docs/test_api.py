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
ENTRY = re.compile(r"^### `\w+`\n\n```text\n(?P<call>[^`]+)```\n(?P<body>.*?)(?=^##|\Z)", re.M | re.S)
ENTRIES = {" ".join(entry["call"].split()): entry["body"] for entry in ENTRY.finditer(PAGE.read_text(encoding="utf-8"))}
"""Call, in one line -> the text and the example."""


def offered(name: str) -> Any:
    """The value of megatron.module.name or megatron.module.Class.method."""
    module, _, attribute = name.rpartition(".")
    return getattr(offered(module) if module.split(".")[-1][0].isupper() else import_module(module), attribute)


def call_of(name: str) -> str:
    """The name with the parameters of its value, without their types."""
    given = inspect.signature(offered(name)).parameters.values()
    text = str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in given]))
    text = re.sub(r"<function (\w+) at \w+>", r"\1", text)
    return name + re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", text)


@pytest.mark.parametrize("call", ENTRIES)
def test_the_call_is_the_signature(call: str) -> None:
    """A call that ends with `...` is the signature's beginning."""
    whole, beginning = call_of(call.split("(")[0]), call.removesuffix("...)")
    assert whole == call or (beginning != call and whole.startswith(beginning))


def test_every_name_has_an_example_that_uses_it() -> None:
    assert len(ENTRIES) == PAGE.read_text(encoding="utf-8").count("\n### ") >= 20
    for call, body in ENTRIES.items():
        name = call.split("(")[0].split(".")[-1]
        assert re.search(rf"```python\n.*\b{name}\b.*```", body, re.S), f"{name} has no example"


def test_the_examples_run(tmp_path: Path) -> None:
    """Runs them in the page's order and in one folder, as a reader does."""
    root, script = copy_checkout(tmp_path).root, []
    for block in blocks_of(PAGE.read_text(encoding="utf-8"), "docs/api.md"):
        example = f"example_{block.line}.py"
        if block.language == "python":
            (root / example).write_text(block.text, encoding="utf-8")
        if block.language in ("python", "bash"):
            script.append(f"python {example}" if block.language == "python" else block.text)
    Checkout(root, warm=True).must_run("\n".join(script))

"""Reads the tokenizer of each export in a forked process instead of a fresh one."""

from __future__ import annotations

from typing import Any

from megatron.interop.hf import tokenizer_check
from tests.helpers.warm import warm_python

_fresh = tokenizer_check.ask_fresh


def ask_warm() -> None:
    """Asks the warm server, which starts with the first export."""

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        tokenizer_check.PYTHON = warm_python()
        return _fresh(request)

    tokenizer_check.ask_fresh = ask

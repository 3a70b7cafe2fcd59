"""Collects the tables in operations' test files, for tests that cover all operations.

REFUSED      operation -> [(arguments of a call that its kernel cannot take, message)]
CPU_PROOFS   operation -> proof of a kernel for the CPU only (other proofs are in megatron/ops/proof/)
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

from megatron.ops.proof import PROOFS, Proof
from tests.policy.rules import ROOT

Refused = dict[str, list[tuple[tuple[Any, ...], str]]]
FOLDER = ROOT / "tests" / "unit" / "ops"


def files_with(name: str) -> list[str]:
    """Modules that have a table of this name."""
    has = re.compile(rf"^{name}(: \w+)? = \{{", re.MULTILINE)
    return [f"tests.unit.ops.{path.stem}" for path in sorted(FOLDER.glob("test_*.py")) if has.search(path.read_text())]


@cache
def declared(name: str) -> dict[str, Any]:
    """Entries of all tables of this name; no operation has two."""
    entries: dict[str, Any] = {}
    for module in files_with(name):
        table = getattr(import_module(module), name)
        assert not entries.keys() & table.keys(), f"{module}: {name} has {entries.keys() & table.keys()} again"
        entries |= table
    return entries


def cpu_proofs() -> dict[str, Proof]:
    return declared("CPU_PROOFS")


def all_proofs() -> dict[str, Proof]:
    return PROOFS | cpu_proofs()

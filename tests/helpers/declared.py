"""What the test file of an operation says of it, for the tests that all operations go through.

REFUSED      operation -> [(arguments of a call that its kernel cannot take, what is said of them)]
CPU_PROOFS   operation -> proof of a kernel that is for the CPU alone (others have theirs in megatron/ops/proof/)
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
    """The modules that have a table of this name."""
    has = re.compile(rf"^{name}(: \w+)? = \{{", re.MULTILINE)
    return [f"tests.unit.ops.{path.stem}" for path in sorted(FOLDER.glob("test_*.py")) if has.search(path.read_text())]


@cache
def declared(name: str) -> dict[str, Any]:
    """All entries of the tables of this name; no operation has two."""
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

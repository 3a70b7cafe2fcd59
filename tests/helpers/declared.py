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


@cache
def declared(name: str) -> dict[str, Any]:
    """All entries of the tables of this name; no operation has two."""
    entries: dict[str, Any] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        if re.search(rf"^{name}(: \w+)? = \{{", path.read_text(), re.MULTILINE):
            table = getattr(import_module(f"tests.unit.ops.{path.stem}"), name)
            assert not entries.keys() & table.keys(), f"{path.name}: {name} has {entries.keys() & table.keys()} again"
            entries |= table
    return entries


def cpu_proofs() -> dict[str, Proof]:
    return declared("CPU_PROOFS")


def all_proofs() -> dict[str, Proof]:
    return PROOFS | cpu_proofs()

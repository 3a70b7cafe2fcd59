"""The operations of this package: every module here that defines OPERATIONS has some."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from megatron.ops.operation import Operation

_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
_MODULES = [module for name in _NAMES if hasattr(module := import_module(f"megatron.ops.{name}"), "OPERATIONS")]
OPERATIONS: dict[str, Operation] = {one.name: one for module in _MODULES for one in module.OPERATIONS}


def register(namespace: str) -> None:
    """Tells torch the shapes and gradients of the operations of a loaded library."""
    for module in _MODULES:
        if hasattr(module, "register"):
            module.register(namespace)

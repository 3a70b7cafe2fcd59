"""All operations of this package, collected from the modules that define OPERATIONS."""

from importlib import import_module
from pathlib import Path

from megatron.ops.operation import Operation, kernel_name


# Both functions are defined before the imports below, because some modules import them.
def register(namespace: str) -> None:
    """Registers shapes and gradients of a loaded library's operations with torch."""
    for module in _MODULES:
        if hasattr(module, "register"):
            module.register(namespace)


def kernels_in(folder: str) -> list[str]:
    """Returns the names of all kernels with sources in one folder of csrc/."""
    rows = [(one.name, one.native) for one in OPERATIONS.values()]
    return [
        kernel_name(name, dtype)
        for name, native in rows
        if native is not None and native.folder == folder
        for dtype in native.dtypes
    ]


_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
_MODULES = [module for name in _NAMES if hasattr(module := import_module(f"megatron.ops.{name}"), "OPERATIONS")]
OPERATIONS: dict[str, Operation] = {one.name: one for module in _MODULES for one in module.OPERATIONS}

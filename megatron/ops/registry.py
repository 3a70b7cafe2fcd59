"""The operations of this package: every module here that defines OPERATIONS has some."""

from importlib import import_module
from pathlib import Path

from megatron.ops.operation import Operation, kernel_name


# Both are defined before the modules are imported, some of which import them.
def register(namespace: str) -> None:
    """Tells torch the shapes and gradients of the operations of a loaded library."""
    for module in _MODULES:
        if hasattr(module, "register"):
            module.register(namespace)


def kernels_in(folder: str) -> list[str]:
    """Names of all kernels whose sources are in one folder of csrc/."""
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

"""Python files outside the package (tools, benchmarks, pretrain scripts) as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.policy.rules import ROOT


def load_script(path: str | Path) -> ModuleType:
    """Executes a file, relative to the checkout or anywhere, anew under its own name, not as `__main__`."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

"""The kernels compiled from csrc/: found, checked and loaded, or the reason why not. Nothing is compiled here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
PATH = FOLDER / "_kernels.so"
VERIFIED = FOLDER / "gpu_verified.json"
NAMESPACE = "megatron_native"
BUILD = "python setup.py build_ext --inplace"


@dataclass(frozen=True)
class Library:
    """`missing` says why nothing was loaded; `unverified` names the CUDA sources that no GPU has checked like this."""

    missing: str | None = None
    cuda: bool = False
    unverified: frozenset[str] = field(default=frozenset())

    @property
    def ops(self) -> Any:
        return getattr(torch.ops, NAMESPACE)


@cache
def library() -> Library:
    """That of this installation, loaded on the first call."""
    return load(PATH)


def load(path: Path) -> Library:
    record = path.with_suffix(".json")
    if not path.is_file():
        return Library(f"not built: {BUILD}")
    try:
        built = json.loads(record.read_text(encoding="utf-8"))
        expected = built["sha256"]
        sources: Mapping[str, str] = built["cuda_sources"]
    except (OSError, ValueError, KeyError):
        return Library(f"{record.name} beside it is missing or damaged; build again: {BUILD}")
    # A truncated object would not fail to load: it would kill the process when a missing page is touched.
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        return Library(f"{path.name} is not what was built (truncated or replaced); build again: {BUILD}")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        return Library(f"torch {torch.__version__} cannot load it ({reason}); build again: {BUILD}")
    from megatron.ops import native

    native.register(NAMESPACE)
    verified = _verified_sources()
    unverified = frozenset(name for name, digest in sources.items() if verified.get(name) != digest)
    return Library(None, bool(built.get("cuda")), unverified)


def _verified_sources() -> Mapping[str, str]:
    """Source name -> hash of what tools/gpu_check.py last found right on a GPU."""
    try:
        return dict(json.loads(VERIFIED.read_text(encoding="utf-8"))["sources"])
    except (OSError, ValueError, KeyError):
        return {}

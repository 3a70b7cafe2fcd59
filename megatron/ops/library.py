"""The kernels compiled from csrc/: found, checked and loaded, or the reason why not. Nothing is compiled here."""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
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
SOURCES = FOLDER.parents[1] / "csrc"
PARTS = ("common", "cpu", "cuda", "torch")
# Installed away from its sources, the package can only be installed again.
BUILD = (
    "python setup.py build_ext --inplace" if SOURCES.is_dir() else "pip install --no-build-isolation, in its sources"
)


@dataclass(frozen=True)
class Library:
    """Why nothing was loaded, or why no CUDA; `unverified`: the CUDA sources that no GPU has checked as they are."""

    missing: str | None = None
    without_cuda: str | None = None
    unverified: frozenset[str] = field(default=frozenset())

    @property
    def ops(self) -> Any:
        return getattr(torch.ops, NAMESPACE)


@dataclass(frozen=True)
class _Record:
    """What csrc/build.py wrote beside the shared object."""

    sha256: str
    machine: str
    without_cuda: str | None
    sources: Mapping[str, str]
    cuda_sources: Mapping[str, str]


@cache
def library() -> Library:
    """That of this installation, loaded on the first call."""
    return load(PATH)


def load(path: Path, sources: Path = SOURCES) -> Library:
    if not path.is_file():
        return Library(f"not built: {BUILD}")
    try:
        built = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        sources_of = dict(built["sources"]), dict(built["cuda_sources"])
        record = _Record(built["sha256"], built["machine"], built["without_cuda"], *sources_of)
    except (OSError, ValueError, KeyError, TypeError):
        return Library(f"not usable: {path.with_suffix('.json').name} is missing or damaged; build again: {BUILD}")
    try:
        reason = _why_unusable(path, record, sources)
    except OSError as error:
        return Library(f"not usable: {error.filename} cannot be read ({error.strerror}); make it readable, or {BUILD}")
    if reason is not None:
        return Library(f"{reason}; build again: {BUILD}")
    from megatron.ops import native

    native.register(NAMESPACE)
    verified = _verified_sources()
    unverified = frozenset(name for name, digest in record.cuda_sources.items() if verified.get(name) != digest)
    return Library(None, record.without_cuda, unverified)


def _why_unusable(path: Path, record: _Record, sources: Path) -> str | None:
    """Loads it, if it can be."""
    # A truncated object would not fail to load: it would kill the process when a missing page is touched.
    if _digest(path) != record.sha256:
        return f"not usable: {path.name} is not what was built (truncated or replaced)"
    # The system's own word for this is that there is no such file.
    if record.machine != platform.machine():
        return f"not usable: {path.name} was built for {record.machine}, and this machine is {platform.machine()}"
    if sources.is_dir() and _hashes(sources) != record.sources:
        return f"older than {sources.name}/"
    try:
        tier = ctypes.CDLL(str(path)).mk_cpu_tier()
        torch.ops.load_library(path)
    except (OSError, AttributeError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        return f"not usable: torch {torch.__version__} cannot load them ({reason})"
    return (
        None if tier > 0 else "not usable: this CPU has none of the instruction sets they are built for (AVX2 or more)"
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hashes(sources: Path) -> dict[str, str]:
    """As csrc/build.py records them. They are compared where the sources are, so that a build is never a stale one."""
    files = (path for part in PARTS for path in (sources / part).glob("*") if path.suffix in (".h", ".cpp", ".cu"))
    return {path.relative_to(sources).as_posix(): _digest(path) for path in files}


def _verified_sources() -> Mapping[str, str]:
    """Source name -> hash of what tools/gpu_check.py last found right on a GPU."""
    try:
        record = json.loads(VERIFIED.read_text(encoding="utf-8"))
        return dict(record["sources"]) if record["device_type"] == "cuda" else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}

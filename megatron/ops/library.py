"""The kernels compiled from csrc/: found, checked and loaded, or the reason why not. Nothing is compiled here."""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
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
class Gpu:
    """What decides whether compiled kernels run on a machine's GPU: pairs of major and minor."""

    capability: tuple[int, int]
    cuda: tuple[int, int]  # the newest that the driver knows; (0, 0): torch does not say


def this_gpu() -> Gpu | None:
    """That of the current device, if there is one."""
    if not torch.cuda.is_available():
        return None
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()  # 12080 is 12.8
    return Gpu(torch.cuda.get_device_capability(), (version // 1000, version % 1000 // 10))


@dataclass(frozen=True)
class Library:
    """Why nothing was loaded, or why no CUDA; `unverified`: the CUDA sources that no GPU has checked as they are;
    `needs`: the oldest GPU and the CUDA that its CUDA kernels are compiled for."""

    missing: str | None = None
    without_cuda: str | None = None
    unverified: frozenset[str] = field(default=frozenset())
    needs: Gpu | None = None

    def why_not_on(self, gpu: Gpu | None) -> str | None:
        """Why its CUDA kernels would not even start there."""
        if gpu is None or self.needs is None:
            return None
        if gpu.capability < self.needs.capability:
            oldest, here = _dotted(self.needs.capability), _dotted(gpu.capability)
            return f"compiled for GPUs of capability {oldest} or newer, not {here}"
        if (0, 0) < gpu.cuda < (self.needs.cuda[0], 0):
            return (
                f"built with CUDA {_dotted(self.needs.cuda)}, and the GPU's driver knows CUDA {_dotted(gpu.cuda)} at "
                f"most: update the driver, or build with an older CUDA_HOME ({BUILD})"
            )
        return None

    @property
    def ops(self) -> Any:
        return getattr(torch.ops, NAMESPACE)


@dataclass(frozen=True)
class _Record:
    """What csrc/build.py wrote beside the shared object."""

    sha256: str
    machine: str
    without_cuda: str | None
    needs: Gpu | None
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
        needs = built["needs_of_cuda"]
        least = None if needs is None else Gpu(_pair(needs["capability"]), _pair(needs["cuda"]))
        record = _Record(built["sha256"], built["machine"], built["without_cuda"], least, *sources_of)
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
    return Library(None, record.without_cuda, unverified, record.needs)


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    major, minor = numbers
    return int(major), int(minor)


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


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

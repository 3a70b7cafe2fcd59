"""Finds, checks and loads the kernels compiled from csrc/, or reports why it cannot. It compiles nothing."""

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

from megatron.commands import build_command
from megatron.ops.registry import kernels_in, register
from megatron.utils.typed import typed

FOLDER = Path(__file__).resolve().parent
PATH = FOLDER / "_kernels.so"
VERIFIED = FOLDER / "gpu_verified.json"
NAMESPACE = "megatron_native"
SOURCES = FOLDER.parents[1] / "csrc"
OTHER_EXTENSION = "data"  # folder of csrc/ that is built separately
UNVERIFIED = "not yet verified on this GPU in the kernel's current version"


@dataclass(frozen=True)
class Gpu:
    """Compute capability and CUDA version, as (major, minor): of a machine's GPU, or those that kernels require."""

    capability: tuple[int, int]
    cuda: tuple[int, int]  # the newest that the driver supports; (0, 0): unknown


def this_gpu() -> Gpu | None:
    """Returns the current GPU, or None."""
    if not torch.cuda.is_available():
        return None
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()  # 12080 is 12.8
    return Gpu(torch.cuda.get_device_capability(), (version // 1000, version % 1000 // 10))


@dataclass(frozen=True)
class Library:
    """The loaded kernels, or the reason why there are none (`missing`) or none for CUDA (`without_cuda`).

    Field `unverified` maps names of CUDA kernels (`kernel_name`) that are not known to be correct to the reason. Field
    `needs` has the minimum compute capability and CUDA version. Field `cuda_sources` maps each folder to the hash of
    its CUDA sources."""

    missing: str | None = None
    without_cuda: str | None = None
    unverified: Mapping[str, str] = field(default_factory=dict)
    needs: Gpu | None = None
    cuda_sources: Mapping[str, str] = field(default_factory=dict)

    def why_not_on(self, gpu: Gpu | None) -> str | None:
        """Returns the reason why the CUDA kernels cannot be launched on this GPU, or None."""
        if gpu is None or self.needs is None:
            return None
        if gpu.capability < self.needs.capability:
            oldest, here = _dotted(self.needs.capability), _dotted(gpu.capability)
            return f"compiled for GPUs of capability {oldest} or newer, not {here}"
        if (0, 0) < gpu.cuda < (self.needs.cuda[0], 0):
            return (
                f"built with CUDA {_dotted(self.needs.cuda)}, but the GPU's driver supports at most CUDA "
                f"{_dotted(gpu.cuda)}: update the driver, or build with an older CUDA_HOME ({build_command()})"
            )
        return None

    @property
    def ops(self) -> Any:
        return getattr(torch.ops, NAMESPACE)


@dataclass(frozen=True)
class _Record:
    """The record that csrc/build.py writes next to the shared object."""

    sha256: str
    machine: str
    without_cuda: str | None
    needs_of_cuda: Gpu | None
    sources: Mapping[str, str]
    cuda_sources: Mapping[str, str]


@cache
def library() -> Library:
    """Returns the kernels of this installation, loaded on the first call."""
    return load(PATH)


@cache
def c_library() -> ctypes.CDLL | None:
    """Returns the kernels as a C library, for functions without tensors; None if they cannot be used."""
    return None if library().missing is not None else ctypes.CDLL(str(PATH))


def load(path: Path, sources: Path = SOURCES) -> Library:
    if not path.is_file():
        return Library(f"not built; build them: {build_command()}")
    try:
        record = typed(_Record, json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return Library(
            f"not usable: {path.with_suffix('.json').name} is missing or damaged; build again: {build_command()}"
        )
    try:
        reason = _why_unusable(path, record, sources)
    except OSError as error:
        return Library(
            f"not usable: {error.filename} cannot be read ({error.strerror}); make it readable, or {build_command()}"
        )
    if reason is not None:
        return Library(f"{reason}; build again: {build_command()}")
    register(NAMESPACE)
    verified, folders = _verified_kernels(), record.cuda_sources
    unknown = [name for folder in folders for name in kernels_in(folder) if verified.get(name) != folders[folder]]
    return Library(None, record.without_cuda, dict.fromkeys(unknown, UNVERIFIED), record.needs_of_cuda, folders)


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _why_unusable(path: Path, record: _Record, sources: Path) -> str | None:
    """Loads the shared object, or returns the reason why it cannot be used."""
    # A truncated object would load, and crash the process at the first missing page.
    if _digest(path) != record.sha256:
        return f"not usable: {path.name} was truncated or replaced after it was built"
    # Otherwise the loader's message would be that the file does not exist.
    if record.machine != platform.machine():
        return f"not usable: {path.name} was built for {record.machine}, but this machine is {platform.machine()}"
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
    """Hashes of the sources, as csrc/build.py records them. A build whose sources have changed is stale."""
    files = (path for path in sources.glob("*/*") if path.suffix in (".h", ".cpp", ".cu"))
    return {
        path.relative_to(sources).as_posix(): _digest(path) for path in files if path.parent.name != OTHER_EXTENSION
    }


def _verified_kernels() -> Mapping[str, str]:
    """Returns kernel name -> hash of its folder's sources, for kernels that tools/gpu_check.py verified on a GPU."""
    try:
        record = json.loads(VERIFIED.read_text(encoding="utf-8"))
        return dict(record["verified"]) if record["device_type"] == "cuda" else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}

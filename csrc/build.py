"""Compiles csrc/ into one shared object that loads in any torch from 2.10 on, with or without CUDA.

    python csrc/build.py                   # megatron/ops/_kernels.so
    python csrc/build.py --emulated DIR    # DIR/_kernels.so: the CUDA kernels, run on the CPU by common/emulator.h

setup.py calls it; nothing else ever compiles. Objects are kept under build/kernels by the hash of all that made them,
so an unchanged file is never compiled twice and two builds at once do not disturb each other. Standard library only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent
OUTPUT = CSRC.parent / "megatron" / "ops" / "_kernels.so"
CACHE = CSRC.parent / "build" / "kernels"
TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10
COMMON_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    f"-ffile-prefix-map={CSRC.parent}=.",
)
CPU_FLAGS = ("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wall")
TIERS = {"v3": ("-march=x86-64-v3",), "v4": ("-march=x86-64-v4", "-mprefer-vector-width=512")}
GPU_FLAGS = ("-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90")
SANITIZERS = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-g", "-O1")


class BuildError(Exception):
    """Why nothing was built, in one line."""


@dataclass(frozen=True)
class Unit:
    source: Path
    command: tuple[str, ...]  # without input and output

    def object(self, compilers: str) -> Path:
        key = hashlib.sha256("\0".join((compilers, *self.command, source_hash(self.source))).encode())
        return CACHE / f"{self.source.stem}-{key.hexdigest()[:24]}.o"


def source_hash(source: Path) -> str:
    """Of a file and of everything it includes from csrc/."""
    seen: dict[Path, bytes] = {}
    pending = [source.resolve()]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen[path] = path.read_bytes()
        lines = [line.strip() for line in seen[path].decode().splitlines()]
        names = [line.split('"')[1] for line in lines if line.startswith("#include") and '"' in line]
        pending += [found for name in names if (found := (path.parent / name).resolve()).is_file()]
    digest = hashlib.sha256()
    for path in sorted(seen):
        digest.update(f"{path.relative_to(CSRC)}\0{len(seen[path])}\0".encode() + seen[path])
    return digest.hexdigest()


def torch_headers() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed where this is built (pip needs --no-build-isolation)")
    folder = Path(spec.origin).parent / "include"
    if not (folder / "torch" / "csrc" / "stable" / "ops.h").is_file():
        raise BuildError(f"{folder} has no headers of torch's stable ABI (2.10 or newer)")
    return folder


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise BuildError("no C++ compiler (g++) on the PATH")


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(str(Path(home) / "bin" / "nvcc"))


def units(cxx: str, cuda: str | None, emulated: bool) -> list[Unit]:
    torch_flags = ("-isystem", str(torch_headers()), f"-DTORCH_TARGET_VERSION={TORCH_TARGET}")
    cuda_flag = ("-DMK_HAS_CUDA",) if cuda else ()
    emulation = ("-DMK_EMULATED", *SANITIZERS) if emulated else ()
    result = [
        Unit(source, (cxx, *COMMON_FLAGS, "-Wall", *torch_flags, *cuda_flag, *emulation))
        for source in sorted((CSRC / "torch").glob("*.cpp"))
    ]
    gpu_sources = sorted((CSRC / "cuda").glob("*.cu"))
    if emulated:
        return result + [
            Unit(source, (cxx, *COMMON_FLAGS, *emulation, "-Wno-unknown-pragmas", "-x", "c++"))
            for source in gpu_sources
        ]
    tiers = TIERS if platform.machine() in ("x86_64", "AMD64") else {"base": ()}
    result += [
        Unit(source, (cxx, *COMMON_FLAGS, *CPU_FLAGS, *flags, f"-DMK_TIER={tier}"))
        for source in sorted((CSRC / "cpu").glob("*.cpp"))
        for tier, flags in tiers.items()
    ]
    if cuda:
        flags = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", *GPU_FLAGS)
        result += [Unit(source, (cuda, *flags)) for source in gpu_sources]
    return result


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{Path(command[0]).name}: {lines[0].strip() if lines else 'failed'}")


def compile_unit(unit: Unit, compilers: str) -> Path:
    target = unit.object(compilers)
    if not target.exists():
        temporary = target.with_suffix(f".{os.getpid()}.tmp.o")
        try:
            run((*unit.command, "-c", str(unit.source), "-o", str(temporary)))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


def link(cxx: str, objects: Sequence[Path], output: Path, cuda: str | None, emulated: bool) -> None:
    # By name only: the torch that loads us is already there, wherever it is installed.
    flags = ["-shared", "-Wl,-z,relro,-z,now", f"-L{torch_headers().parent / 'lib'}", "-ltorch_cpu"]
    if emulated:
        flags.append("-fsanitize=undefined")
    elif cuda:
        library = Path(cuda).resolve().parent.parent / "lib64"
        if not library.is_dir():
            library = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64"
        flags += [f"-L{library}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    temporary = output.with_suffix(f".{os.getpid()}.tmp")
    try:
        run((cxx, *map(str, objects), *flags, "-o", str(temporary)))
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def build(output: Path = OUTPUT, *, emulated: bool = False, cuda: str | None = None) -> dict[str, object]:
    """Writes `output` and, beside it, a .json that says what is in it; returns the latter."""
    cxx = compiler()
    if not emulated:
        cuda = cuda or nvcc()
    compilers = "\0".join(
        subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
        for name in (cxx, cuda)
        if name
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system when the holder ends, however it ends
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            everything = units(cxx, cuda, emulated)
            objects = list(pool.map(lambda unit: compile_unit(unit, compilers), everything))
        link(cxx, objects, output, cuda, emulated)
    record = {
        "sha256": hashlib.sha256(output.read_bytes()).hexdigest(),
        "cuda": cuda is not None and not emulated,
        "cuda_sources": {path.stem: source_hash(path) for path in sorted((CSRC / "cuda").glob("*.cu"))},
    }
    beside = output.with_suffix(".json")
    temporary = beside.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(beside)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", type=Path, metavar="DIR", help="the CUDA kernels for the CPU, with sanitizers")
    args = parser.parse_args()
    output = OUTPUT if args.emulated is None else args.emulated / OUTPUT.name
    try:
        record = build(output, emulated=args.emulated is not None)
    except BuildError as error:
        print(f"kernels: not built ({error})", file=sys.stderr)
        return 1
    print(f"kernels: built {output}{' with CUDA' if record['cuda'] else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

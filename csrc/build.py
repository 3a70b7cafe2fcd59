"""Compiles csrc/ into two shared objects. torch need not be installed.

The kernels load in any torch from 2.10 on, with or without CUDA; the index builders load in any Python.

    python csrc/build.py                   # megatron/ops/_kernels.so and megatron/data/_helpers.so
    python csrc/build.py --emulated DIR    # DIR/_kernels.so: the CUDA kernels, run on the CPU by common/emulator.h

Called by setup.py; nothing else compiles. Every operation has a folder, with files of these names:

    math.h      Arguments and formulas that the CPU's and the GPU's kernels share.
    cpu*.cpp    CPU kernels, compiled once per instruction set.
    cuda*.cu    CUDA kernels.
    torch.cpp   Checks of the tensors, and registration with torch.
    product.h   If it exists, the CPU kernels multiply matrices (see PRODUCT_HEADER).

The folder common/ has the code that several operations share; data/ has the index builders. The file common/stable.h
declares the functions of torch that are called; linking records only the name libtorch_cpu.so.

Objects are cached in build/kernels under a hash of their sources, commands and compilers, so an unchanged file is
compiled once. A lock allows one build at a time; the system releases it when its process ends. If the CUDA kernels do
not compile, the CPU kernels are built without them. CXX and CUDA_HOME choose compilers. Standard library only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent
KERNELS, HELPERS = Path("megatron", "ops", "_kernels.so"), Path("megatron", "data", "_helpers.so")
OUTPUT = CSRC.parent / KERNELS
TORCH_LIBRARY = "libtorch_cpu.so"
CACHE = CSRC.parent / "build" / "kernels"
COMMON_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
)
# Objects do not depend on the checkout's path, so the path is not part of their hash.
PREFIX_MAP = f"-ffile-prefix-map={CSRC.parent}=."
# -Wno-uninitialized: GCC warns about its own intrinsics.
CPU_FLAGS = ("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-uninitialized")
WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
TIERS = {"v3": ("-march=x86-64-v3",), "v4": WIDE, "v4_bf16": (*WIDE, "-mavx512bf16")}
# Kernels that multiply matrices are also compiled for the bf16 instructions (v4_bf16), and fuse a multiplication with
# an addition only where the source says so: the backward pass must compute exactly the scores of the forward pass.
PRODUCT_HEADER, UNFUSED = "product.h", ("-ffp-contract=off",)
EQUAL_TO_NUMPY = ("random",)  # folders whose results equal numpy's bit for bit: nothing is fused either
GPUS = (80, 90, 100, 120)  # compute capabilities (A100, H100, B200, RTX 50) that machine code is made for; others JIT
CUDA_HOME = "/usr/local/cuda"
HELPERS_FOLDER, SUFFIXES = "data", (".h", ".cpp", ".cu")
UNUSED_DAYS = 14  # days without use after which an object is deleted
LOCK_SECONDS = 900.0
SAY_SECONDS = 10.0  # between two lines about a running build
SANITIZERS = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-g0", "-O1")


class BuildError(Exception):
    """The build failed; the message is the reason, in one line."""


class CudaError(BuildError):
    """The CUDA part was not built; the message is the reason, in one line."""


@dataclass(frozen=True)
class Cuda:
    nvcc: str
    libraries: Path


@dataclass(frozen=True)
class Unit:
    source: Path
    command: tuple[str, ...]  # without input and output
    failure: type[BuildError] = BuildError

    def object(self, cache: Path, compilers: str) -> Path:
        command = (word.replace(str(CSRC), ".") for word in self.command)  # without the checkout's path
        key = hashlib.sha256("\0".join((compilers, *command, source_hash(self.source))).encode())
        return cache / f"{self.source.parent.name}-{self.source.stem}-{key.hexdigest()[:24]}.o"


def source_hash(*sources: Path) -> str:
    """Hash of files and of everything that they include from csrc/."""
    seen: dict[Path, bytes] = {}
    pending = [source.resolve() for source in sources]
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


def sources() -> list[Path]:
    """Source files of the kernels."""
    return sorted(path for path in CSRC.glob("*/*") if path.suffix in SUFFIXES and path.parent.name != HELPERS_FOLDER)


def binding_sources() -> list[Path]:
    return [path for path in sources() if path.suffix == ".cpp" and not path.stem.startswith("cpu")]


def cpu_sources() -> list[Path]:
    return [path for path in sources() if path.suffix == ".cpp" and path.stem.startswith("cpu")]


def cuda_sources() -> list[Path]:
    return [path for path in sources() if path.suffix == ".cu"]


def cuda_folders() -> list[str]:
    """The folders whose operations have CUDA kernels."""
    return sorted({source.parent.name for source in CSRC.glob("*/cuda*.cu")})


def compiler() -> tuple[str, ...]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen and not shutil.which(chosen[0]):
        raise BuildError(f"CXX={' '.join(chosen)}: no such program")
    for command in (chosen, ["g++"], ["clang++"], ["c++"]):
        if command and shutil.which(command[0]):
            return tuple(command)
    raise BuildError("no C++ compiler on the PATH; install g++, or set CXX")


def cuda_program(name: str) -> str | None:
    """Path of a CUDA program: CUDA_HOME's, else the PATH's, else that of the usual place."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which(name, path=str(Path(home or CUDA_HOME) / "bin"))
    return found if home is not None else shutil.which(name) or found


def find_cuda() -> Cuda:
    home, found = os.environ.get("CUDA_HOME"), cuda_program("nvcc")
    if found is None:
        raise CudaError(f"CUDA_HOME={home} has no bin/nvcc" if home else "no nvcc was found")
    roots = [Path(found).resolve().parent.parent, Path(home or CUDA_HOME)]  # the nvcc of the PATH may be a wrapper
    folders = [root / name for root in roots for name in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib")]
    libraries = next((folder for folder in folders if (folder / "libcudart_static.a").is_file()), None)
    if libraries is None:
        raise CudaError(f"no libcudart_static.a was found near {found}")
    return Cuda(found, libraries)


def torch_units(cxx: Sequence[str], *, cuda: bool, emulated: bool) -> list[Unit]:
    flags = ["-Wall"] + ["-DMK_HAS_CUDA"] * cuda + ["-DMK_EMULATED", *SANITIZERS] * emulated
    return [Unit(source, (*cxx, *COMMON_FLAGS, *flags)) for source in binding_sources()]


def cpu_units(cxx: Sequence[str]) -> list[Unit]:
    tiers = TIERS if platform.machine() in ("x86_64", "AMD64") else {"base": ()}
    units = []
    for source in cpu_sources():
        products = (source.parent / PRODUCT_HEADER).is_file()
        unfused = UNFUSED if products or source.parent.name in EQUAL_TO_NUMPY else ()
        for tier, flags in tiers.items():
            if products or tier != "v4_bf16":
                own = (*flags, *unfused, f"-DMK_TIER={tier}")
                units.append(Unit(source, (*cxx, *COMMON_FLAGS, *CPU_FLAGS, *own)))
    return units


def cuda_units(command: Sequence[str], failure: type[BuildError]) -> list[Unit]:
    return [Unit(source, tuple(command), failure) for source in cuda_sources()]


def gpus(cuda: Cuda) -> list[int]:
    """The compute capabilities in GPUS that this nvcc supports."""
    known = re.findall(r"\bsm_(\d+)\b", run([cuda.nvcc, "--list-gpu-code"], CudaError))
    found = [gpu for gpu in GPUS if str(gpu) in known]
    if not found:
        raise CudaError(f"{cuda.nvcc} supports none of {', '.join(f'sm_{gpu}' for gpu in GPUS)}")
    return found


def nvcc_command(cuda: Cuda) -> tuple[str, ...]:
    """Returns nvcc with its flags. The front end runs twice, the assembler once per GPU: the oldest GPU's PTX serves
    all but the newest. The newest one's PTX is kept for future GPUs."""
    *older, newest = gpus(cuda)
    targets = [f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]"]
    if older:
        targets.insert(0, f"-gencode=arch=compute_{older[0]},code=[{','.join(f'sm_{gpu}' for gpu in older)}]")
    flags = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v")
    return (cuda.nvcc, *flags, *targets, "--threads", "4")


def emulated_command(cxx: Sequence[str]) -> tuple[str, ...]:
    return (*cxx, *COMMON_FLAGS, "-DMK_EMULATED", *SANITIZERS, "-Wno-unknown-pragmas", "-x", "c++")


def outcome(command: Sequence[str], failure: type[BuildError]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise failure(f"{command[0]} does not run ({error.strerror})") from error


def run(command: Sequence[str], failure: type[BuildError] = BuildError) -> str:
    """Returns the command's output; if it fails, raises its first line with an error."""
    done = outcome(command, failure)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        reason = lines[0].strip().replace(f"{CSRC.parent}/", "") if lines else f"ended with code {done.returncode}"
        raise failure(f"{Path(command[0]).name}: {reason}")
    return done.stdout + done.stderr


def compile_unit(unit: Unit, cache: Path, compilers: str) -> Path:
    """Compiles a unit. A .txt beside the object has the compiler's output, with registers and stack of CUDA kernels."""
    target = unit.object(cache, compilers)
    if target.exists():
        target.touch()  # still in use
        return target
    temporary = target.with_suffix(f".{os.getpid()}.tmp.o")
    prefix_map = ("-Xcompiler", PREFIX_MAP) if unit.failure is CudaError else (PREFIX_MAP,)
    try:
        said = run((*unit.command, *prefix_map, "-c", str(unit.source), "-o", str(temporary)), unit.failure)
        target.with_suffix(".txt").write_text(said)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def link(cxx: Sequence[str], objects: Sequence[Path], output: Path, flags: Sequence[str]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_suffix(f".{os.getpid()}.tmp")
    try:
        run((*cxx, *map(str, objects), "-shared", "-Wl,-z,relro,-z,now", *flags, "-o", str(temporary)))
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def link_to_torch(cxx: Sequence[str], objects: Sequence[Path], output: Path, flags: Sequence[str]) -> None:
    """Links against an empty library with the name of torch's. When the object is loaded, torch is in the process
    already, and the loader finds the functions there. No path is stored."""
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder) / TORCH_LIBRARY
        run((*cxx, "-shared", f"-Wl,-soname,{TORCH_LIBRARY}", "-o", str(stand_in)))
        link(cxx, objects, output, ("-Wl,--no-as-needed", str(stand_in), *flags))


@contextmanager
def alone(cache: Path, seconds: float) -> Iterator[None]:
    """Holds the lock of a cache: one build at a time. The lock ends with the process, so it is never stale."""
    cache.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with open(cache / "lock", "a+") as lock:
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
            if time.monotonic() > deadline:
                raise BuildError(
                    f"process {holder} has been building in {cache} for more than {seconds:.0f} s; end it, or wait"
                )
            if not said:
                print(f"kernels: waiting for process {holder}, which builds them too", flush=True)
                said = True
            time.sleep(0.2)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def clean(cache: Path, output: Path) -> None:
    """Deletes the temporary files of killed builds (the lock is held) and objects unused for UNUSED_DAYS."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in (*cache.glob("*.tmp*"), *output.parent.glob(f"{output.stem}.*.tmp")):
        path.unlink(missing_ok=True)
    for path in cache.glob("*.o"):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
            path.with_suffix(".txt").unlink(missing_ok=True)


@dataclass(frozen=True)
class Recipe:
    """Compiler, units and flags of one shared object."""

    cxx: tuple[str, ...]
    units: tuple[Unit, ...]
    link_flags: tuple[str, ...]
    compilers: str  # their --version


def recipe(cxx: tuple[str, ...], cuda: Cuda | None, *, emulated: bool) -> Recipe:
    units = torch_units(cxx, cuda=cuda is not None, emulated=emulated)
    flags: tuple[str, ...] = ()
    if emulated:
        units += cuda_units(emulated_command(cxx), BuildError)
        flags = ("-fsanitize=undefined",)
    else:
        units += cpu_units(cxx) + (cuda_units(nvcc_command(cuda), CudaError) if cuda is not None else [])
    if cuda is not None:
        flags = (f"-L{cuda.libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread")
    return Recipe(cxx, tuple(units), flags, versions(cxx, cuda))


def versions(cxx: Sequence[str], cuda: Cuda | None) -> str:
    said = outcome([*cxx, "--version"], BuildError).stdout
    return said if cuda is None else said + "\0" + outcome([cuda.nvcc, "--version"], CudaError).stdout


def compile_all(units: Sequence[Unit], compilers: str, cache: Path) -> list[Path]:
    """Compiles the units and returns their objects in order. Prints how many have to be compiled, and progress."""
    workers = os.cpu_count() or 1
    missing = sum(not unit.object(cache, compilers).exists() for unit in units)
    if missing:
        print(f"kernels: compiling {missing} of {len(units)} objects, {workers} at once", flush=True)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        # CUDA units take longest: if begun last, one of them would keep one core busy at the end.
        longest_first = sorted(units, key=lambda unit: unit.failure is not CudaError)
        jobs = {unit: pool.submit(compile_unit, unit, cache, compilers) for unit in longest_first}
        pending = set(jobs.values())
        try:
            while pending:
                done, pending = concurrent.futures.wait(pending, SAY_SECONDS, concurrent.futures.FIRST_EXCEPTION)
                for job in done:
                    job.result()
                if pending:
                    print(f"kernels: {len(jobs) - len(pending)} of {len(units)} objects are ready", flush=True)
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    return [jobs[unit].result() for unit in units]


def compile_and_link(cxx: tuple[str, ...], cuda: Cuda | None, output: Path, cache: Path, *, emulated: bool) -> None:
    chosen = recipe(cxx, cuda, emulated=emulated)
    link_to_torch(cxx, compile_all(chosen.units, chosen.compilers, cache), output, chosen.link_flags)


def needs_of_cuda(cuda: Cuda) -> dict[str, list[int]]:
    """Minimum compute capability and CUDA version (the driver's) of the CUDA kernels."""
    release = re.search(r"release (\d+)\.(\d+)", outcome([cuda.nvcc, "--version"], CudaError).stdout)
    if release is None:
        raise CudaError(f"{cuda.nvcc} --version names no release")
    return {"capability": list(divmod(gpus(cuda)[0], 10)), "cuda": [int(number) for number in release.groups()]}


def write_record(output: Path, without_cuda: str | None, needs: dict[str, list[int]] | None) -> dict[str, object]:
    shared = [path for path in sources() if path.parent.name == "common" and path.suffix != ".h"]
    folders = {name: (*(CSRC / name).glob("cuda*.cu"), CSRC / name / "torch.cpp", *shared) for name in cuda_folders()}
    record: dict[str, object] = {
        "sha256": hashlib.sha256(output.read_bytes()).hexdigest(),
        "machine": platform.machine(),
        "without_cuda": without_cuda,
        "needs_of_cuda": needs,
        "sources": {str(path.relative_to(CSRC)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources()},
        "cuda_sources": {name: source_hash(*files) for name, files in folders.items()},
    }
    beside = output.with_suffix(".json")
    temporary = beside.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(beside)
    finally:
        temporary.unlink(missing_ok=True)
    return record


def build(
    output: Path = OUTPUT, *, emulated: bool = False, cache: Path = CACHE, lock_seconds: float = LOCK_SECONDS
) -> dict[str, object]:
    """Writes `output` and a .json that describes it, and returns the description."""
    cxx = compiler()
    with alone(cache, lock_seconds):
        clean(cache, output)
        try:
            cuda = None if emulated else find_cuda()
            compile_and_link(cxx, cuda, output, cache, emulated=emulated)
            needs = None if cuda is None else needs_of_cuda(cuda)
            return write_record(output, "the emulator takes its place" if emulated else None, needs)
        except CudaError as error:
            compile_and_link(cxx, None, output, cache, emulated=False)
            return write_record(output, str(error), None)


def build_helpers(output: Path, *, cache: Path = CACHE, lock_seconds: float = LOCK_SECONDS) -> None:
    """Builds the library of megatron.data's index builders, whose results equal numpy's bit for bit."""
    cxx = compiler()
    flags = (*COMMON_FLAGS, *UNFUSED, "-Wall", "-pthread")
    units = [Unit(source, (*cxx, *flags)) for source in sorted((CSRC / HELPERS_FOLDER).glob("*.cpp"))]
    with alone(cache, lock_seconds):
        link(cxx, compile_all(units, versions(cxx, None), cache), output, ("-pthread",))


def build_into(root: Path) -> list[str]:
    """Builds everything under a folder that has the layout of a checkout. Returns a line for each library."""
    lines = []
    try:
        lines.append(f"{summary(build(root / KERNELS))}: {root / KERNELS}")
    except (BuildError, OSError) as error:  # a full disk must not prevent the installation either
        lines.append(f"kernels: not built ({error}); PyTorch's own operations are used, which are slower")
    try:
        build_helpers(root / HELPERS)
        lines.append(f"index builders: built: {root / HELPERS}")
    except (BuildError, OSError) as error:
        lines.append(f"index builders: not built ({error}); numpy is used, which is slower")
    return lines


def summary(record: dict[str, object]) -> str:
    """Describes a build in one line."""
    reason = record["without_cuda"]
    return "kernels: built, with CUDA" if reason is None else f"kernels: built for the CPU, without CUDA ({reason})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--emulated", type=Path, metavar="DIR", help="Builds the CUDA kernels for the CPU, with sanitizers."
    )
    args = parser.parse_args()
    if args.emulated is None:
        lines = build_into(CSRC.parent)
        print("\n".join(lines))
        return int(any("not built" in line for line in lines))
    output = args.emulated / OUTPUT.name
    try:
        print(f"{summary(build(output, emulated=True))}: {output}")
    except (BuildError, OSError) as error:
        print(f"kernels: not built ({error})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

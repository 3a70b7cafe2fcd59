"""Checks that every CUDA kernel is correct and repeatable, and its speed (tools/gpu_check.py --part ops)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csrc.build import cuda_program
from megatron.ops.library import PATH, library
from megatron.ops.proof import PROOFS, SMALL, OperationReport, Proof, doubts, judge
from megatron.ops.proof.apart import judge_apart
from megatron.ops.registry import kernels_in
from megatron.ops.select import why_not_native
from megatron.utils.durable import write_atomically

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gpu_check.py"  # starts the processes of this part
SANITIZER_FOUND = 9  # the sanitizer's exit code for an error in a kernel
WRONG = 3  # our exit code for a wrong kernel
OUR_KERNELS = "kns=2mk4cuda"  # part of all our mangled names; torch's own kernels are not checked
YET_TO_RUN = "not run: the check was interrupted before"
SANITIZERS = ("memcheck", "racecheck", "synccheck")
BUILD = ROOT / "csrc" / "build.py"
BUILDING = 180.0  # seconds, at most
DRIVER = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def output_of(*command: str, seconds: float = 30) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{command[0]}: not done within {seconds:.0f} s"
    said = done.stdout.strip() or done.stderr.strip()
    return said if done.returncode == 0 else f"exit code {done.returncode}: {said or 'no message'}"


def environment(device: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda of torch": str(torch.version.cuda)}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": output_of(*DRIVER),
        }
    else:
        found["device"] = platform.processor() or platform.machine()
    return found | {"nvcc": output_of(cuda_program("nvcc") or "nvcc", "--version").rpartition("\n")[2]}


# ---------------------------------------------------------------- the library


def why_not(device: str) -> str | None:
    """Returns the reason why the kernels do not load, or None. The test runs in a new process, because only that loads
    a new build, and because it may crash."""
    code = "from megatron.ops.select import why_not_native as w; from megatron.ops.library import library as l; "
    said = output_of(sys.executable, "-c", f"{code}print(w(l(), {device!r}) or '')", seconds=120)
    return said or None


def make_ready(device: str) -> str | None:
    """Builds the kernels if they do not load. Returns the reason why they still do not, or None."""
    reason = why_not(device)
    if reason is None:
        return None
    print(f"the kernels are {reason}: building", flush=True)
    print(output_of(sys.executable, str(BUILD), seconds=BUILDING), flush=True)
    return why_not(device)


# ---------------------------------------------------------------- correctness


def judge_all(
    seed: int,
    where: tuple[Any, str],
    twin: Any,
    say: Callable[[str], None] = print,
    largest: int | None = None,
    proofs: Iterable[Proof] = PROOFS.values(),
) -> list[OperationReport]:
    verdicts = []
    for proof in proofs:
        for dtype in proof.dtypes:
            verdict = judge(proof, dtype, seed, where, twin, largest)
            verdicts.append(verdict)
            say(verdict.line())
    return verdicts


def judged(args: argparse.Namespace, seconds: float) -> list[OperationReport]:
    folders, verdicts = sorted({proof.folder for proof in PROOFS.values()}), []
    for verdict in judge_apart(folders, args.device, seed=args.seed, seconds=seconds):
        verdicts.append(verdict)
        print(verdict.line(), flush=True)
    return verdicts


def sanitize(seed: int, seconds: float = 250) -> Iterator[tuple[str, str]]:
    """Runs the comparison on small shapes under compute-sanitizer's tools, one after another within the time limit.
    Yields each tool with 'clean' or the end of its output."""
    program = cuda_program("compute-sanitizer")
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for tool in SANITIZERS:
            begin = time.monotonic()
            said = "not run: compute-sanitizer is not installed"
            if program is not None:
                said = _sanitized(program, tool, seed, max(0.0, until - begin), Path(folder) / tool)
            print(f"compute-sanitizer {tool}: {said} ({time.monotonic() - begin:.0f} s)", flush=True)
            yield tool, said


def _sanitized(program: str, tool: str, seed: int, seconds: float, output: Path) -> str:
    process = _sanitizing(program, tool, seed, seconds, output)
    try:
        return _verdict(process.wait(seconds), output.read_text(errors="replace").strip())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also kills the program that the sanitizer has started
        process.wait()
        return f"not run: it took longer than the remaining {seconds:.0f} s"


def _sanitizing(program: str, tool: str, seed: int, seconds: float, output: Path) -> subprocess.Popen[bytes]:
    command = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), "--kernel-name", OUR_KERNELS]
    # The sanitizer aborts a program that does not use CUDA within 10 s; importing torch may take that long.
    command += ["--target-processes", "application-only", "--launch-timeout", f"{max(10, seconds):.0f}"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # torch probes the driver for optional features
    command += [sys.executable, str(TOOL), "--part", "ops", "--only-small", "--seed", str(seed)]
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def end_allocations_with_tensors() -> None:
    """Gives every tensor its own allocation, so that compute-sanitizer sees accesses beyond its end. Torch's allocator
    would place many tensors in one."""
    torch.cuda.init()  # before it this setting is ignored
    torch.cuda.memory.caching_allocator_enable(False)


def _verdict(code: int, said: str) -> str:
    """Returns 'clean', the tool's findings, or the reason why it did not run."""
    if code == 0:
        return "clean"
    # Lines of the sanitizer, if there are any: the first one names the error, and the stacks follow.
    own = [line for line in said.splitlines() if line.startswith("=========")]
    if broken := [line for line in own if "Internal Sanitizer Error" in line]:
        return f"not run: {broken[0].strip('= ')}"
    if code not in (SANITIZER_FOUND, WRONG):
        return f"not run: exit code {code}: {said[-300:]}"
    return "\n".join(own)[:600] or said[-600:]


# ---------------------------------------------------------------- speed


def times(device: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures every kernel, first in bf16. Keeps the results from before a failure or timeout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = [sys.executable, "benchmarks/kernels.py", "--device", device, "--rounds", str(rounds)]
        command += ["--dtype", "bf16", "fp32", "--seconds", f"{seconds:.0f}", "--json", str(path)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=ROOT, check=False, timeout=seconds + 40)
        return list(json.loads(path.read_text())["results"]) if path.is_file() else []


# ---------------------------------------------------------------- the record


def verified_kernels(
    verdicts: Sequence[OperationReport], built: dict[str, str], sanitized: dict[str, str]
) -> dict[str, str]:
    """Returns kernel (an operation in one dtype) -> hash of its folder's sources, for the correct kernels.

    The result is empty if a sanitizer found anything or has still to run. A sanitizer that does not work on this
    machine is ignored; the record has its reason."""
    if any(said != "clean" and (said == YET_TO_RUN or not said.startswith("not run")) for said in sanitized.values()):
        return {}
    right = {}
    for folder, digest in sorted(built.items()):
        wrong = doubts(folder, PROOFS.values(), verdicts)
        right |= {kernel: digest for kernel in kernels_in(folder) if kernel not in wrong}
    return right


def write_record(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, [f"{json.dumps(record, indent=1)}\n".encode()])


def check_ops(args: argparse.Namespace) -> int:
    start = time.monotonic()
    # --only-small is for child processes; their parent has prepared everything.
    if (reason := why_not_native(library(), args.device) if args.only_small else make_ready(args.device)) is not None:
        print(f"the kernels are {reason}", file=sys.stderr)
        return 1
    if args.only_small:
        if args.device == "cuda":
            end_allocations_with_tensors()
        where = library().ops, args.device
        # racecheck itself fails in cuBLAS' bf16 products (H200, CUDA 13.0), although only our kernels are selected.
        own = [proof for proof in PROOFS.values() if not proof.products]
        return WRONG * any(verdict.wrong for verdict in judge_all(args.seed, where, None, largest=SMALL, proofs=own))
    about = about_run(args)
    print("\n".join(f"{name}: {value}" for name, value in about["environment"].items()), f"seed: {args.seed}", sep="\n")
    verdicts = judged(args, (args.seconds - (time.monotonic() - start)) / 2)
    built = json.loads(PATH.with_suffix(".json").read_text(encoding="utf-8"))["cuda_sources"]
    sanitized = dict.fromkeys(SANITIZERS, YET_TO_RUN) if args.device == "cuda" else {}

    def write(**later: Any) -> dict[str, str]:
        verified = verified_kernels(verdicts, built, sanitized)
        judged = {"sanitizer": sanitized, "verdicts": [asdict(verdict) for verdict in verdicts]}
        write_record(args.out, about | {"verified": verified} | judged | later)
        return verified

    write()
    left = args.seconds - (time.monotonic() - start)
    if args.device == "cuda":
        for tool, said in sanitize(args.seed, max(0, left - 90 * bool(args.rounds))):
            sanitized[tool] = said
            write()
    left = args.seconds - (time.monotonic() - start)
    verified = write(times=times(args.device, args.rounds, max(0, left - 30)) if args.rounds else [])
    missed = [kernel for folder in sorted(built) for kernel in kernels_in(folder) if kernel not in verified]
    for name, said in sanitized.items():
        if said.startswith("not run"):
            print(f"WITHOUT compute-sanitizer {name}, which was {said}")
    print(f"{args.out}: {len(verified)} kernels verified; not: {', '.join(missed) or 'none'}; "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    return int(bool(missed))


# ---------------------------------------------------------------- the start of every part


def about_run(args: argparse.Namespace) -> dict[str, Any]:
    """The beginning of every part's record."""
    return {
        "part": args.part,
        "device_type": args.device,
        "environment": environment(args.device),
        "seed": args.seed,
    }

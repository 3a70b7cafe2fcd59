"""Checks on a GPU what cannot be checked without one. Each part takes less than eight minutes.

    python tools/gpu_check.py --part ops       # every CUDA kernel: right, repeatable, how fast; writes the record
    python tools/gpu_check.py --part steps     # whole training steps (benchmarks/gpu_steps.py)

`ops` builds the kernels if they do not load, compares each with fp64 and with its CPU twin on fresh random inputs,
twice, lets compute-sanitizer look at small shapes where it is installed, times each against PyTorch, torch.compile and
a copy of its bytes, and writes megatron/ops/gpu_verified.json. `--kernels auto` takes a CUDA kernel only if its source
is in that record as it is: commit it. `--device cpu` does the same with the CPU kernels, to see that this tool runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config.tool import run_tool
from megatron.ops.library import PATH, VERIFIED, library
from megatron.ops.proof import SUBJECTS, Draw, Subject, check, flat_tensors

ROOT = Path(__file__).resolve().parent.parent
SMALL = 20_000  # elements: what compute-sanitizer does in seconds
SANITIZERS = ("memcheck", "racecheck", "synccheck")
DRIVER = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


@dataclass(frozen=True)
class Verdict:
    """What one operation did in one dtype: the largest error, that of its CPU twin, and what was wrong."""

    op: str
    source: str
    dtype: str
    tensors: int
    error: float
    error_of_twin: float
    wrong: tuple[str, ...]


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return (done.stdout.strip() or done.stderr.strip()) if done.returncode == 0 else f"exit code {done.returncode}"


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
    return found | {"nvcc": output_of("nvcc", "--version").rpartition("\n")[2]}


# ---------------------------------------------------------------- the library


def why_not(device: str) -> str | None:
    """Asked of a new process: a library that was built meanwhile is seen, and one that crashes is survived."""
    code = "from megatron.ops.library import library as l; print(l().missing or CUDA and l().without_cuda or '')"
    code = code.replace("CUDA", str(device == "cuda"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return (done.stdout.strip() or None) if done.returncode == 0 else f"exit code {done.returncode}"


def make_ready(device: str) -> str | None:
    """Builds the kernels unless they load as they are; why they still do not, or None."""
    reason = why_not(device)
    if reason is None:
        return None
    print(f"the kernels are {reason}: building", flush=True)
    print(output_of(sys.executable, "setup.py", "-q", "build_ext", "--inplace"), flush=True)
    return why_not(device)


# ---------------------------------------------------------------- right


def elements(args: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in flat_tensors(list(args)))


def judge(
    subject: Subject, dtype: torch.dtype, seed: int, where: tuple[Any, str], twin: Any, largest: int | None = None
) -> Verdict:
    """`where`: torch.ops.<namespace> and the device; `twin`: the operations of the CPU, or None."""
    errors, twin_errors, wrong = [0.0], [0.0], []
    for call in subject.calls(Draw(dtype, torch.Generator().manual_seed(seed))):
        if largest is not None and elements(call.args) > largest:
            continue
        try:
            findings = check(subject, call, *where)
        except (RuntimeError, AssertionError) as error:  # a launch that failed, an argument that was changed
            wrong.append(f"{call.name}: {str(error).splitlines()[0]}")
            continue
        errors += [finding.error for finding in findings]
        wrong += [f"{call.name}: {finding.tensor}: {finding.wrong}" for finding in findings if finding.wrong]
        if twin is not None:
            twin_errors += [finding.error for finding in check(subject, call, twin, "cpu")]
    name = str(dtype).removeprefix("torch.")
    return Verdict(subject.name, subject.source, name, len(errors) - 1, max(errors), max(twin_errors), tuple(wrong))


def judge_all(
    seed: int, where: tuple[Any, str], twin: Any, say: Callable[[str], None] = print, largest: int | None = None
) -> list[Verdict]:
    verdicts = []
    for subject in SUBJECTS.values():
        for dtype in subject.dtypes:
            verdict = judge(subject, dtype, seed, where, twin, largest)
            verdicts.append(verdict)
            say(
                f"{verdict.op:<24} {verdict.dtype:<9} {verdict.tensors:4} tensors  error {verdict.error:.2e}  "
                f"CPU {verdict.error_of_twin:.2e}  {'; '.join(verdict.wrong[:3]) or 'right'}"
            )
    return verdicts


def sanitize(seed: int) -> dict[str, str]:
    """The same comparison under each of compute-sanitizer's tools, on small shapes; 'clean' or what was said last."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return dict.fromkeys(SANITIZERS, "not run: compute-sanitizer is not installed")
    results = {}
    for tool in SANITIZERS:
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
        command += ["--part", "ops", "--only-small", "--seed", str(seed)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
            results[tool] = "clean" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-300:]
        except subprocess.TimeoutExpired:
            results[tool] = "not run: it took longer than 120 s"
        print(f"compute-sanitizer {tool}: {results[tool]}", flush=True)
    return results


# ---------------------------------------------------------------- fast


def times(device: str, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = [sys.executable, "benchmarks/kernels.py", "--device", device, "--rounds", str(rounds)]
        done = subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=False)
        return json.loads(path.read_text())["results"] if done.returncode == 0 else []


# ---------------------------------------------------------------- the record


def verified_sources(verdicts: Sequence[Verdict], built: dict[str, str], sanitized: dict[str, str]) -> dict[str, str]:
    """The sources of which every operation was right in every dtype; none if a sanitizer found anything."""
    if any(said != "clean" and not said.startswith("not run") for said in sanitized.values()):
        return {}
    judged = {verdict.source for verdict in verdicts if verdict.tensors}
    failed = {verdict.source for verdict in verdicts if verdict.wrong}
    return {source: digest for source, digest in sorted(built.items()) if source in judged - failed}


def write_record(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def check_ops(args: argparse.Namespace) -> int:
    if (reason := make_ready(args.device)) is not None:
        print(f"the kernels are {reason}", file=sys.stderr)
        return 1
    where = library().ops, args.device
    if args.only_small:
        return int(any(verdict.wrong for verdict in judge_all(args.seed, where, None, largest=SMALL)))
    start, about = time.monotonic(), environment(args.device)
    print("\n".join(f"{name}: {value}" for name, value in about.items()), f"seed: {args.seed}", sep="\n", flush=True)
    verdicts = judge_all(args.seed, where, library().ops if args.device == "cuda" else None)
    sanitized = sanitize(args.seed) if args.device == "cuda" else {}
    built = json.loads(PATH.with_suffix(".json").read_text(encoding="utf-8"))["cuda_sources"]
    record = {
        "device_type": args.device,
        "sources": verified_sources(verdicts, built, sanitized),
        "environment": about,
        "seed": args.seed,
        "sanitizer": sanitized,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "times": times(args.device, args.rounds) if args.rounds else [],
    }
    write_record(args.out, record)
    missed = sorted(set(built) - set(record["sources"]))
    print(f"{args.out}: {', '.join(record['sources']) or 'nothing'} verified; not: {', '.join(missed) or 'none'}; "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    return int(bool(missed))


def check_steps(args: argparse.Namespace) -> int:
    return subprocess.run([sys.executable, "benchmarks/gpu_steps.py", "--device", args.device], cwd=ROOT).returncode


PARTS = {"ops": check_ops, "steps": check_steps}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="ops")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, help="of the inputs; another one every time unless given")
    parser.add_argument("--rounds", type=int, default=20, help="of the timing; 0: no timing")
    parser.add_argument("--out", type=Path, help="where the record goes (default on a GPU: beside the kernels)")
    parser.add_argument("--only-small", action="store_true", help="only compare, only small shapes, write nothing")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu checks the CPU kernels in the same way")
    if args.out is None and args.device == "cuda":
        args.out = VERIFIED
    if args.out is None and args.part == "ops" and not args.only_small:
        parser.error("--device cpu: name the file for the record with --out; the committed one is a GPU's")
    args.seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    return PARTS[args.part](args)


if __name__ == "__main__":
    sys.exit(run_tool("gpu_check.py", main))

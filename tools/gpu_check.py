"""Checks on a GPU what cannot be checked without one. Each part ends before --seconds are over (450).

    python tools/gpu_check.py --part ops       # every CUDA kernel: right, repeatable, how fast; writes the record
    python tools/gpu_check.py --part steps     # whole training steps (benchmarks/gpu_steps.py)
    python tools/gpu_check.py --part peers     # beside transformers and a plain model (benchmarks/gpu_peers.py)
    python tools/gpu_check.py --part nccl      # two or more GPUs: every kind of parallelism (benchmarks/gpu_ranks.py)

`ops` builds the kernels if they do not load, compares each with fp64 and with its CPU twin on fresh random inputs,
twice, lets compute-sanitizer look at small shapes where it is installed, times each against PyTorch, torch.compile and
a copy of its bytes, and writes megatron/ops/gpu_verified.json. `--kernels auto` takes a CUDA kernel only if its source
is in that record as it is: commit it. The other parts write gpu_check_PART.json; what stands after -- goes to their
benchmark: `--part peers -- --sizes 345M`. Whatever has been measured is written at once, so that
a run that is cut off leaves it. `--device cpu` does the same with the CPU, small, to see that this tool runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_peers, gpu_ranks, gpu_steps
from csrc.build import cuda_program
from megatron.ops.library import PATH, VERIFIED, library
from megatron.ops.proof import PROOFS, Draw, Proof, check, flat_tensors
from megatron.ops.select import why_not_native
from megatron.utils.command_line import run_tool
from megatron.utils.durable import write_atomically

ROOT = Path(__file__).resolve().parent.parent
SMALL = 20_000  # elements: what compute-sanitizer does in seconds
SANITIZER_FOUND = 9  # its exit code when it found something
WRONG = 3  # our own when a kernel was wrong
OUR_KERNELS = "kns=2mk4cuda"  # in all their mangled names: torch's own kernels are not checked
YET_TO_RUN = "not run: the check was cut off before"
SANITIZERS = ("memcheck", "racecheck", "synccheck")
BUILD = ROOT / "csrc" / "build.py"
BUILDING = 180.0  # seconds, at most
DRIVER = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


@dataclass(frozen=True)
class Verdict:
    """The result for one operation in one dtype: the largest error, that of its CPU twin, and what was wrong."""

    op: str
    room: str
    dtype: str
    tensors: int
    error: float
    error_of_twin: float
    wrong: tuple[str, ...]


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
    """Why the kernels do not load, asked in a new process, which sees a new build and may crash; or None."""
    code = "from megatron.ops.select import why_not_native as w; from megatron.ops.library import library as l; "
    said = output_of(sys.executable, "-c", f"{code}print(w(l(), {device!r}) or '')", seconds=120)
    return said or None


def make_ready(device: str) -> str | None:
    """Builds the kernels if they do not load. Returns why they still do not, or None."""
    reason = why_not(device)
    if reason is None:
        return None
    print(f"the kernels are {reason}: building", flush=True)
    print(output_of(sys.executable, str(BUILD), seconds=BUILDING), flush=True)
    return why_not(device)


# ---------------------------------------------------------------- right


def elements(args: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in flat_tensors(list(args)))


def judge(
    proof: Proof, dtype: torch.dtype, seed: int, where: tuple[Any, str], twin: Any, largest: int | None = None
) -> Verdict:
    """`where`: torch.ops.<namespace> and the device; `twin`: the operations of the CPU, or None."""
    errors, twin_errors, wrong = [0.0], [0.0], []
    for call in proof.calls(Draw(dtype, torch.Generator().manual_seed(seed))):
        if largest is not None and elements(call.args) > largest:
            continue
        try:
            findings = check(proof, call, *where)
        except Exception as error:  # a launch that failed, an argument that was changed, an output of a wrong shape
            wrong.append(f"{call.name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
            continue
        errors += [finding.error for finding in findings]
        wrong += [f"{call.name}: {finding.tensor}: {finding.wrong}" for finding in findings if finding.wrong]
        if twin is not None:
            twin_errors += [finding.error for finding in check(proof, call, twin, "cpu")]
    name = str(dtype).removeprefix("torch.")
    return Verdict(proof.name, proof.room, name, len(errors) - 1, max(errors), max(twin_errors), tuple(wrong))


def judge_all(
    seed: int, where: tuple[Any, str], twin: Any, say: Callable[[str], None] = print, largest: int | None = None
) -> list[Verdict]:
    verdicts = []
    for proof in PROOFS.values():
        for dtype in proof.dtypes:
            verdict = judge(proof, dtype, seed, where, twin, largest)
            verdicts.append(verdict)
            say(line(verdict))
    return verdicts


def line(verdict: Verdict) -> str:
    return (
        f"{verdict.op:<24} {verdict.dtype:<9} {verdict.tensors:4} tensors  error {verdict.error:.2e}  "
        f"CPU {verdict.error_of_twin:.2e}  {'; '.join(verdict.wrong[:3]) or 'right'}"
    )


def judge_apart(args: argparse.Namespace, seconds: float) -> list[Verdict]:
    """Judges each folder of csrc/ in a process of its own, all at once: after an illegal access a process can no longer
    use its GPU, and the other folders are judged all the same."""
    sources = sorted({proof.room for proof in PROOFS.values()})
    until, verdicts = time.monotonic() + seconds, []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--part", "ops", "--device", args.device, "--seed", str(args.seed)]
        files = {source: Path(folder) / f"{source}.json" for source in sources}
        started = {
            source: subprocess.Popen([*command, "--judge", source, "--out", str(file)], cwd=ROOT)
            for source, file in files.items()
        }
        for source, process in started.items():
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
                ended = f"its process ended with exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended = f"not judged within {seconds:.0f} s"
            file = files[source]
            found = [Verdict(**v) for v in json.loads(file.read_text())] if file.is_file() else []
            found = [replace(verdict, wrong=tuple(verdict.wrong)) for verdict in found]
            if ended:
                print(f"{source}: {ended}", flush=True)
                found.append(Verdict(source, source, "", 0, 0.0, 0.0, (ended,)))
            verdicts += found
    return verdicts


def judge_one(args: argparse.Namespace) -> int:
    """Judges one folder, as started by `judge_apart`; saves its verdicts after every dtype."""
    twin = library().ops if args.device == "cuda" else None
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 6))  # the others compute their oracles, too
    verdicts: list[Verdict] = []
    for proof in PROOFS.values():
        if proof.room == args.judge:
            for dtype in proof.dtypes:
                verdicts.append(judge(proof, dtype, args.seed, (library().ops, args.device), twin))
                print(line(verdicts[-1]), flush=True)
                args.out.write_text(json.dumps([asdict(verdict) for verdict in verdicts]))
    return 0


def sanitize(seed: int, seconds: float = 150) -> dict[str, str]:
    """Runs the comparison on small shapes under each of compute-sanitizer's tools, all at once. Returns 'clean' for a
    tool, or the end of its output."""
    program = cuda_program("compute-sanitizer")
    if program is None:
        return dict.fromkeys(SANITIZERS, "not run: compute-sanitizer is not installed")
    with tempfile.TemporaryDirectory() as folder:
        started = {tool: _sanitizing(program, tool, seed, seconds, Path(folder) / tool) for tool in SANITIZERS}
        until, results = time.monotonic() + seconds, {}
        for tool, process in started.items():
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
                said = (Path(folder) / tool).read_text(errors="replace").strip()
                results[tool] = _verdict(code, said)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and the program under it
                process.wait()
                results[tool] = f"not run: it took longer than {seconds:.0f} s"
            print(f"compute-sanitizer {tool}: {results[tool]}", flush=True)
    return results


def _sanitizing(program: str, tool: str, seed: int, seconds: float, output: Path) -> subprocess.Popen[bytes]:
    command = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), "--kernel-name", OUR_KERNELS]
    # It gives up on a program that has not used CUDA for 10 s, and torch alone may take that long to be imported.
    command += ["--target-processes", "application-only", "--launch-timeout", f"{max(10, seconds):.0f}"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # torch probes the driver for optional features
    command += [sys.executable, __file__, "--part", "ops", "--only-small", "--seed", str(seed)]
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def end_allocations_with_tensors() -> None:
    """One allocation per tensor, so that compute-sanitizer sees accesses beyond a tensor's end: torch's allocator puts
    many tensors into one."""
    torch.cuda.init()  # before it this setting is ignored
    torch.cuda.memory.caching_allocator_enable(False)


def _verdict(code: int, said: str) -> str:
    """'clean', what the tool found, or that it did not run."""
    if code == 0:
        return "clean"
    return said[-600:] if code in (SANITIZER_FOUND, WRONG) else f"not run: exit code {code}: {said[-300:]}"


# ---------------------------------------------------------------- fast


def times(device: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Times of every kernel, first in bf16, which trains. Keeps what was measured before a failure or timeout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = [sys.executable, "benchmarks/kernels.py", "--device", device, "--rounds", str(rounds)]
        command += ["--dtype", "bf16", "fp32", "--seconds", f"{seconds:.0f}", "--json", str(path)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=ROOT, check=False, timeout=seconds + 40)
        return list(json.loads(path.read_text())["results"]) if path.is_file() else []


# ---------------------------------------------------------------- the record


def verified_sources(verdicts: Sequence[Verdict], built: dict[str, str], sanitized: dict[str, str]) -> dict[str, str]:
    """Folder -> hash of its sources, for the folders whose operations were right in every dtype.

    None if a sanitizer found anything, or while one has still to run. One that does not work here does not count: the
    record names it, and why."""
    if any(said != "clean" and (said == YET_TO_RUN or not said.startswith("not run")) for said in sanitized.values()):
        return {}
    judged = {verdict.room for verdict in verdicts if verdict.tensors}
    failed = {verdict.room for verdict in verdicts if verdict.wrong}
    return {source: digest for source, digest in sorted(built.items()) if source in judged - failed}


def write_record(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, [f"{json.dumps(record, indent=1)}\n".encode()])


def check_ops(args: argparse.Namespace) -> int:
    start = time.monotonic()
    apart = args.only_small or args.judge is not None  # started by a process that has prepared everything
    if (reason := why_not_native(library(), args.device) if apart else make_ready(args.device)) is not None:
        print(f"the kernels are {reason}", file=sys.stderr)
        return 1
    if args.only_small:
        if args.device == "cuda":
            end_allocations_with_tensors()
        where = library().ops, args.device
        return WRONG * any(verdict.wrong for verdict in judge_all(args.seed, where, None, largest=SMALL))
    if args.judge is not None:
        return judge_one(args)
    about = about_run(args)
    print("\n".join(f"{name}: {value}" for name, value in about["environment"].items()), f"seed: {args.seed}", sep="\n")
    verdicts = judge_apart(args, (args.seconds - (time.monotonic() - start)) / 2)
    built = json.loads(PATH.with_suffix(".json").read_text(encoding="utf-8"))["cuda_sources"]
    sanitized = dict.fromkeys(SANITIZERS, YET_TO_RUN) if args.device == "cuda" else {}

    def write(**later: Any) -> dict[str, str]:
        sources = verified_sources(verdicts, built, sanitized)
        judged = {"sanitizer": sanitized, "verdicts": [asdict(verdict) for verdict in verdicts]}
        write_record(args.out, about | {"sources": sources} | judged | later)
        return sources

    write()
    left = args.seconds - (time.monotonic() - start)
    if args.device == "cuda":
        sanitized = sanitize(args.seed, min(150, max(0, left / 2)))
        write()
    left = args.seconds - (time.monotonic() - start)
    sources = write(times=times(args.device, args.rounds, max(0, left - 30)) if args.rounds else [])
    missed = sorted(set(built) - set(sources))
    for name, said in sanitized.items():
        if said.startswith("not run"):
            print(f"WITHOUT compute-sanitizer {name}, which was {said}")
    print(f"{args.out}: {', '.join(sources) or 'nothing'} verified; not: {', '.join(missed) or 'none'}; "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    return int(bool(missed))


# ---------------------------------------------------------------- whole steps


def check_benchmark(args: argparse.Namespace) -> int:
    """Runs a benchmark, which writes the record itself as it goes."""
    words = ["--device", args.device, "--seconds", str(args.seconds), "--json", str(args.out)]
    if args.device == "cpu" and args.part != "nccl":
        words += ["--sizes", "tiny"]
    main = {"steps": gpu_steps.main, "peers": gpu_peers.main, "nccl": gpu_ranks.main}[args.part]
    return main([*words, *args.more], about_run(args))


def about_run(args: argparse.Namespace) -> dict[str, Any]:
    """The beginning of every part's record."""
    return {
        "part": args.part,
        "device_type": args.device,
        "environment": environment(args.device),
        "seed": args.seed,
    }


PARTS = {"ops": check_ops, "steps": check_benchmark, "peers": check_benchmark, "nccl": check_benchmark}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="ops")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, help="of the inputs; another one every time unless given")
    parser.add_argument("--rounds", type=int, default=20, help="of the timing of ops; 0: no timing")
    parser.add_argument("--seconds", type=float, default=450, help="for everything")
    parser.add_argument("--out", type=Path, help="where the record goes (default for ops: beside the kernels)")
    parser.add_argument("--only-small", action="store_true", help="only compare, only small shapes, write nothing")
    parser.add_argument(
        "--judge",
        choices=sorted({proof.room for proof in PROOFS.values()}),
        help="only compare this source; --out gets the verdicts",
    )
    parser.add_argument("more", nargs="*", help="of steps and peers, after --: for their benchmark")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu checks the CPU kernels in the same way")
    if args.more and args.part == "ops":
        parser.error(f"{' '.join(args.more)}: --part ops has no benchmark of steps to hand that to")
    if args.judge is not None and args.out is None:
        parser.error(f"--judge {args.judge}: name the file for the verdicts with --out")
    if args.out is None:
        args.out = VERIFIED if args.part == "ops" else Path(f"gpu_check_{args.part}.json")
    if args.out == VERIFIED and args.device == "cpu" and not args.only_small:
        parser.error("--device cpu: name the file for the record with --out; the committed one is a GPU's")
    if not os.access(args.out.resolve().parent, os.W_OK):
        parser.error(f"--out {args.out}: there is no folder {args.out.resolve().parent} that can be written to")
    args.seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    return PARTS[args.part](args)


if __name__ == "__main__":
    sys.exit(run_tool("gpu_check.py", main))

"""Checks that every parallel layout starts, ends and trains alike on two real devices and on one.

    python benchmarks/gpu_ranks.py                                # every case on the first two GPUs, over nccl
    python benchmarks/gpu_ranks.py --cases TP2 "PP2 1f1b" --connections 1
    python benchmarks/gpu_ranks.py --device cpu --cases TP2       # smoke test over gloo

Each case is a run of pretrain_gpt.py in separate processes with a time limit, so the report survives a hang. Its fp32
losses and gradient norms are compared with those of one device. Every case runs with CUDA_DEVICE_MAX_CONNECTIONS at 1,
which many scripts export, and at 8, CUDA's default. Then the script compares the kernels with fp64 on the second device
and measures bus bandwidths (benchmarks/bus_bandwidth.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOSS_GATE, NORM_GATE = 1e-5, 1e-4
"""Relative limits in fp32. Rounding is 1e-7 in a loss and 1e-6 in a norm; a lost sum or a wrong mask is above 1e-4."""
STEPS = 4
TP, EP, CP = "--tensor-model-parallel-size", "--expert-model-parallel-size", "--context-parallel-size"
PP, VIRTUAL = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
SCHEDULE = "--pipeline-schedule"
EXPERTS = ("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0")


@dataclass(frozen=True)
class Case:
    name: str
    flags: tuple[str, ...]
    ranks: int = 2
    model: tuple[str, ...] = ()
    """Flags that the single device gets too."""


CASES = (
    Case("DP2", ()),
    Case("DP2 overlapped", ("--overlap-grad-reduce",)),
    Case("TP2", (TP, "2")),
    Case("TP2 sequence parallel", (TP, "2", "--sequence-parallel")),
    Case("PP2 1f1b", (PP, "2")),
    Case("PP2 interleaved", (PP, "2", VIRTUAL, "1")),
    Case("PP2 zero-bubble", (PP, "2", SCHEDULE, "zero-bubble")),
    Case("PP2 gpipe", (PP, "2", SCHEDULE, "gpipe")),
    Case("CP2 p2p", (CP, "2")),
    Case("CP2 a2a", (CP, "2", "--cp-comm-type", "a2a")),
    Case("CP2 allgather", (CP, "2", "--cp-comm-type", "allgather")),
    Case("EP2", (EP, "2"), model=EXPERTS),
    Case("TP2 x PP2", (TP, "2", PP, "2"), ranks=4),
    Case("CP2 x PP2", (CP, "2", PP, "2"), ranks=4),
    Case("TP2 x EP2", (TP, "2", EP, "2"), ranks=4, model=EXPERTS),
)
NAMED = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Ended:
    """Outcome of a command: its exit code (None if it was killed at the time limit) and its last output."""

    code: int | None
    said: tuple[str, ...]
    seconds: float


def run_within(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Ended:
    """Runs a command in a new session, and kills the whole session at the time limit."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the ranks that a launcher left behind
            process.wait()
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    return Ended(code, tuple(lines[-300:]), time.monotonic() - started)


def train(ranks: int, flags: Sequence[str], device: str, seconds: float, environment: Mapping[str, str]) -> Any:
    """Runs a training. Returns the records of its steps, or its outcome if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), *_model(device), *flags]
        ended = run_within([*command, "--metrics-jsonl", str(metrics)], seconds, environment)
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    steps = [record for record in records if record["split"] == "train"]
    return steps if ended.code == 0 and len(steps) == STEPS else ended


def _model(device: str) -> list[str]:
    size = 256 if device != "cpu" else 32
    numbers = {
        "--num-layers": 4, "--hidden-size": size, "--num-attention-heads": 4, "--seq-length": size, "--vocab-size": 512,
        "--max-position-embeddings": size, "--micro-batch-size": 2, "--global-batch-size": 8, "--train-iters": STEPS,
        "--lr": 1e-3, "--attention-dropout": 0, "--hidden-dropout": 0, "--eval-iters": 0, "--log-interval": 1,
        "--num-workers": 0, "--distributed-timeout-minutes": 1, "--device": device,
    }  # fmt: skip
    return [*(str(word) for pair in numbers.items() for word in pair), "--mock-data"]


def held_against(got: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the largest relative differences of losses and gradient norms, with a verdict: rounding or not."""

    def largest(name: str) -> float:
        pairs = [(ours[name], theirs[name]) for ours, theirs in zip(got, expected, strict=True)]
        apart = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        return max(math.inf if math.isnan(difference) else difference for difference in apart)

    loss, norm = largest("lm_loss"), largest("grad_norm")
    equal = loss <= LOSS_GATE and norm <= NORM_GATE
    return {"verdict": "equal" if equal else "DIFFERENT", "loss": loss, "grad_norm": norm}


def judge(case: Case, expected: Any, device: str, seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a case and returns its row of the report."""
    started = time.monotonic()
    got = train(case.ranks, [*case.model, *case.flags], device, seconds, environment)
    row: dict[str, Any] = {"case": case.name, **environment, "seconds": round(time.monotonic() - started, 1)}
    if isinstance(got, Ended):
        return row | failure(got, seconds)
    if isinstance(expected, Ended):
        return row | {"verdict": "succeeded; the run on one device failed, so nothing is compared"}
    return row | held_against(got, expected)


def failure(ended: Ended, seconds: float) -> dict[str, Any]:
    own = (
        [line for line in ended.said if re.match(r"error(?: \(rank \d+\))?: ", line)]
        or list(ended.said[-1:])
        or ["no message"]
    )
    what = f"HUNG: not done within {seconds:.0f} s" if ended.code is None else f"FAILED (exit code {ended.code})"
    return {"verdict": f"{what}: {own[0]}", "said": list(ended.said[-30:])}


def line(row: Mapping[str, Any]) -> str:
    numbers = f"loss {row['loss']:.1e}  norm {row['grad_norm']:.1e}" if "loss" in row else ""
    connections = row.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return f"{row['case']:<24} {connections:>2} {row['seconds']:6.1f} s  {row['verdict']}  {numbers}".rstrip()


def kernels_on(device: str) -> int:
    """Compares every native operation with fp64 on a device, which need not be the first. Returns the exit code."""
    import torch

    from megatron.ops.library import library
    from megatron.ops.proof import PROOFS, Draw, compare_call
    from megatron.ops.select import why_not_native

    reason = why_not_native(library(), torch.device(device).type)
    if reason is not None:
        print(f"the kernels are {reason}")
        return 1
    wrong = 0
    for proof in PROOFS.values():
        draw = Draw(proof.dtypes[0], torch.Generator().manual_seed(1))
        for finding in (
            finding for call in proof.calls(draw) for finding in compare_call(proof, call, library().ops, device)
        ):
            if finding.wrong:
                wrong += 1
                print(f"{proof.name}: {finding.tensor}: {finding.wrong}")
    return int(wrong > 0)


def devices(kind: str) -> int:
    """Number of devices, from a separate process so that this one takes no GPU memory."""
    if kind == "cpu":
        return 2
    found = run_within([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], 120, {})
    return int(found.said[-1]) if found.code == 0 else 0


def main(arguments: Sequence[str] | None = None, about: Mapping[str, Any] | None = None) -> int:
    """Runs all cases. `about`: further entries of the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=NAMED, default=list(NAMED))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 8], help="CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--case-seconds", type=float, default=90, help="time limit of one case")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit of the whole script")
    parser.add_argument("--json", type=Path, help="file for the results, written after every row")
    parser.add_argument("--kernels-on", metavar="DEVICE", help="only compare the kernels on this device with fp64")
    args = parser.parse_args(arguments)
    if args.kernels_on is not None:
        return kernels_on(args.kernels_on)
    found = devices(args.device)
    if found < 2:
        parser.error(f"--device {args.device}: needs two devices, found {found}; use --device cpu as a smoke test")
    report = Report(args, about or {})
    for connections in args.connections if args.device == "cuda" else [None]:
        variable = {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        for name in args.cases:
            if NAMED[name].ranks <= max(found, 2 if args.device == "cuda" else 4):
                report.case(NAMED[name], variable)
            else:
                report.left_out(NAMED[name], variable, f"left out: needs {NAMED[name].ranks} devices, found {found}")
    if args.device == "cuda":
        report.command("kernels on cuda:1", [str(Path(__file__)), "--kernels-on", "cuda:1"])
    small = ["--sizes", "1", "--rounds", "2"] if args.device == "cpu" else []
    report.command("bus bandwidths", [str(ROOT / "benchmarks" / "bus_bandwidth.py"), "--device", args.device, *small])
    return int(any(not row["verdict"].startswith(("equal", "done", "left out")) for row in report.rows))


class Report:
    """Report whose rows are printed and written at once."""

    def __init__(self, args: argparse.Namespace, about: Mapping[str, Any]) -> None:
        self._args, self._about = args, about
        self._until = time.monotonic() + args.seconds
        self._one_device: dict[tuple[str, ...], Any] = {}
        self.rows: list[dict[str, Any]] = []

    def case(self, case: Case, environment: Mapping[str, str]) -> None:
        device, seconds = self._args.device, self._left()
        if not seconds:
            return self.left_out(case, environment, "NOT RUN: the time is over")
        if case.model not in self._one_device:
            self._one_device[case.model] = train(1, case.model, device, seconds, {})
        seconds = self._left()
        row = judge(case, self._one_device[case.model], device, seconds, environment)
        if seconds < self._args.case_seconds and row["verdict"].startswith("HUNG"):
            row["verdict"] = f"NOT RUN to its end: --seconds were over after {seconds:.0f} s of it"
        return self._add(row)

    def left_out(self, case: Case, environment: Mapping[str, str], why: str) -> None:
        self._add({"case": case.name, **environment, "seconds": 0.0, "verdict": why})

    def command(self, name: str, words: Sequence[str]) -> None:
        seconds = self._left()
        ended = run_within([sys.executable, *words], seconds, {})
        row = {"case": name, "seconds": round(ended.seconds, 1)}
        told = {"verdict": "done", "said": list(ended.said[-30:])} if ended.code == 0 else failure(ended, seconds)
        self._add(row | told)
        print(*told["said"], sep="\n", flush=True)

    def _left(self) -> float:
        return max(0.0, min(float(self._args.case_seconds), self._until - time.monotonic()))

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        if self._args.json is not None:
            record = {**self._about, "results": self.rows}
            self._args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())

"""Measures whole training steps on one GPU and compares them with this project's targets.

    python benchmarks/gpu_steps.py                       # every size, bf16, dropout 0, no recompute
    python benchmarks/gpu_steps.py --sizes 124M 345M --flags="--cuda-graphs"
    python benchmarks/gpu_steps.py --sizes tiny --device cpu --iters 10 --warm-up 4   # smoke test

Each size is a run of pretrain_gpt.py on mock data, including optimizer, loader and copies to the device. Iterations are
timed in blocks: the clock is read once per block, when the device has finished. The first iterations are warm-up. Model
FLOPs are Megatron's (attention's full square, padded vocabulary), over the 989 TFLOP/s of a dense bf16 H100 or H200.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEAK = 989.4e12
BLOCK = 5  # iterations between two readings of the clock


@dataclass(frozen=True)
class Size:
    name: str
    layers: int
    hidden: int
    heads: int
    seq: int
    micro_batch: int
    vocab: int
    floor: float | None = None  # required share of 989 TFLOP/s
    aim: float | None = None  # desired share
    published: str = ""  # result of a tutorial
    published_tokens: float | None = None  # its tokens/s for one GPU


SIZES = (
    Size("124M", 12, 768, 12, 1024, 64, 50304, 0.38, 0.42),
    Size("345M", 24, 1024, 16, 1024, 32, 50304, 0.42, 0.47, "8 x A100: 29.4 samples/s each", 29.4 * 1024),
    Size("1.3B", 24, 2048, 16, 2048, 8, 50304, 0.50, 0.57),
    Size("2.7B", 32, 2560, 32, 2048, 8, 50304, 0.50, 0.57),
    Size("110M", 12, 768, 12, 1024, 12, 32768, None, None, "8 x A100: 85k tokens/s each", 85_000),
    Size("tiny", 2, 64, 4, 64, 2, 1000),
)
NAMED = {size.name: size for size in SIZES}


def run_flags(size: Size, device: str, iters: int, *, log_interval: int = BLOCK) -> list[str]:
    """Returns the flags for pretrain_gpt.py."""
    flags: dict[str, Any] = {
        "--num-layers": size.layers, "--hidden-size": size.hidden, "--num-attention-heads": size.heads,
        "--seq-length": size.seq, "--max-position-embeddings": size.seq, "--vocab-size": size.vocab,
        "--micro-batch-size": size.micro_batch, "--train-iters": iters, "--lr": 1e-4, "--eval-iters": 0,
        "--attention-dropout": 0, "--hidden-dropout": 0, "--log-interval": log_interval, "--device": device,
    }  # fmt: skip
    return [*(str(word) for pair in flags.items() for word in pair), "--bf16", "--mock-data"]


def measure(
    size: Size, device: str, iters: int, warm_up: int, extra: list[str], until: float = math.inf
) -> dict[str, Any]:
    """Measures a size, and retries with half the batch if memory is too small. `until`: a time.monotonic() deadline."""
    result = measure_once(size, device, iters, warm_up, extra, until)
    too_large = any("out of memory" in text for text in result.get("said", ()))
    if too_large and size.micro_batch > 1 and time.monotonic() < until:
        print(f"{size.name:<6} micro-batch {size.micro_batch} does not fit: {result['failed']}", flush=True)
        return measure(replace(size, micro_batch=size.micro_batch // 2), device, iters, warm_up, extra, until)
    return result


def measure_once(size: Size, device: str, iters: int, warm_up: int, extra: list[str], until: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *run_flags(size, device, iters), *extra]
        command += ["--metrics-jsonl", str(metrics)]
        seconds = max(0.0, until - time.monotonic())
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=None if until == math.inf else seconds
            )
            failed = done.returncode != 0
            said = done.stderr.strip().splitlines() or ["no message"]
        except subprocess.TimeoutExpired:
            failed, said = True, [f"not done within the remaining {seconds:.0f} s"]
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    blocks = [r for r in records if r["split"] == "train" and r["iteration"] > warm_up]
    result = {
        "size": size.name,
        "micro_batch": size.micro_batch,
        **({"failed": said[-1], "said": said[-30:]} if failed else {}),
    }
    return result | (_medians(size, blocks) if blocks else {})


def _medians(size: Size, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = statistics.median(r["seconds_per_iteration"] for r in blocks)
    tflops = statistics.median(r["tflops_per_device"] for r in blocks)
    return {
        "blocks": len(blocks),
        "ms": 1e3 * seconds,
        "tokens_per_second": size.micro_batch * size.seq / seconds,
        "samples_per_second": size.micro_batch / seconds,
        "tflops": tflops,
        "utilisation": tflops * 1e12 / PEAK,
        "waited_for_data_ms": 1e3 * statistics.median(r["data_wait_seconds"] for r in blocks),
        "loss": blocks[-1]["lm_loss"],
    }


def line(size: Size, result: dict[str, Any]) -> str:
    if "ms" not in result:
        return f"{size.name:<6} {result['failed']}"
    share = result["utilisation"]
    verdict = ""
    if size.floor is not None and size.aim is not None:
        reached = "aim reached" if share >= size.aim else ("reached" if share >= size.floor else "MISSED")
        verdict = f"bar {size.floor:.0%}, aim {size.aim:.0%}: {reached}"
    elif size.published_tokens is not None:
        verdict = f"{result['tokens_per_second'] / size.published_tokens:.2f}x of {size.published}"
    if result["micro_batch"] != size.micro_batch:
        verdict += f" (micro-batch {result['micro_batch']}: {size.micro_batch} does not fit)"
    return (
        f"{size.name:<6} {result['ms']:>9.1f} ms {result['tokens_per_second']:>10.0f} tokens/s "
        f"{result['samples_per_second']:>8.1f} samples/s {result['tflops']:>7.1f} TFLOP/s {share:>6.1%}  {verdict}"
        f"{'; then ' + result['failed'] if 'failed' in result else ''}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None, about: Mapping[str, Any] | None = None) -> int:
    """Runs the benchmark. `about`: further entries of the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=NAMED, default=[s.name for s in SIZES if s.name != "tiny"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=15, help="number of first iterations that do not count")
    parser.add_argument("--flags", default="", help='more flags for pretrain_gpt.py, as in --flags="--cuda-graphs"')
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit of the whole script")
    parser.add_argument("--json", type=Path, help="file for the results, written after every size")
    args = parser.parse_args(arguments)
    if args.iters < args.warm_up + BLOCK:
        parser.error(f"--iters {args.iters}: leaves nothing to measure after --warm-up {args.warm_up}; raise it")
    results: list[dict[str, Any]] = []
    until = time.monotonic() + args.seconds
    for name in args.sizes:
        results.append(measure(NAMED[name], args.device, args.iters, args.warm_up, shlex.split(args.flags), until))
        print(line(NAMED[name], results[-1]), flush=True)
        if args.json is not None:
            record = {**(about or {}), "flags": args.flags, "results": results}
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""Compares every kernel with fp64 on inputs of many seeds: the bounds must hold for all of them.

    python -m tests.helpers.proof_seeds --seeds 10000                       # the CPU's kernels
    python -m tests.helpers.proof_seeds --seeds 10000 --device cuda
    python csrc/build.py --emulated build/emulated                         # CUDA, run by the CPU
    python -m tests.helpers.proof_seeds --seeds 10000 --library build/emulated/_kernels.so

Each seed makes one call, in the next dtype and the next of a proof's calls that have at most --largest numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron.ops.library import library
from megatron.ops.proof import PROOFS, Draw, Proof, compare_call
from megatron.ops.proof.judge import elements
from megatron.ops.registry import register


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000, help="of each proof")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for each proof, which then ends early")
    parser.add_argument("--first", type=int, default=1, help="seed")
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda:1")
    parser.add_argument("--library", type=Path, help="a build of the emulator")
    parser.add_argument("--proof", nargs="+", choices=PROOFS, default=list(PROOFS))
    parser.add_argument("--largest", type=int, default=2000, help="how many numbers a call may have")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = library().ops
    if args.library is not None:
        torch.ops.load_library(args.library)
        register("megatron_emulated")
        ops = torch.ops.megatron_emulated
    return max(sweep(PROOFS[name], ops, args) for name in args.proof)


def sweep(proof: Proof, ops: Any, args: argparse.Namespace) -> int:
    """Prints errors, and how much of its bound the largest deviation took; returns 1 if anything was wrong."""
    begin, number, wrong, largest = time.monotonic(), 0, 0, dict.fromkeys(proof.dtypes, 0.0)
    while number < args.seeds and time.monotonic() < begin + args.seconds:
        seed, dtype = args.first + number, proof.dtypes[number % len(proof.dtypes)]
        calls = proof.calls(Draw(dtype, torch.Generator().manual_seed(seed)))
        small = [call for call in calls if elements(call.args) <= args.largest]
        call = small[number // len(proof.dtypes) % len(small)]
        number += 1
        for finding in compare_call(proof, call, ops, args.device):
            if finding.wrong is None:
                largest[dtype] = max(largest[dtype], finding.error)
            else:
                wrong += 1
                print(f"{proof.name} {dtype}, seed {seed}: {call.name}: {finding.tensor}: {finding.wrong}", flush=True)
    shares = ", ".join(f"{str(dtype).removeprefix('torch.')} {share:.3f}" for dtype, share in largest.items())
    seconds = time.monotonic() - begin
    print(f"{proof.name}: {number} seeds, {wrong} wrong; of the bounds {shares}; {seconds:.0f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Judges the kernels of one folder of csrc/, in a process that `judge_apart` starts. Saves the verdicts after every
dtype."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from megatron.ops.library import library
from megatron.ops.proof import PROOFS, OperationReport, judge
from megatron.utils.durable import write_atomically


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron.ops.proof", description=__doc__)
    parser.add_argument("--device", required=True, help="cpu, or a GPU such as cuda:1")
    parser.add_argument("--folder", required=True, help="folder of csrc/ to judge")
    parser.add_argument("--seed", type=int, default=1, help="seed of the inputs")
    parser.add_argument("--largest", type=int, help="largest number of elements of a call; larger calls are skipped")
    parser.add_argument("--out", type=Path, required=True, help="file for the verdicts")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.index is not None:  # "cuda" without an index is the current device
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 6))  # other processes compute their oracles too
    where, twin = (library().ops, str(device)), library().ops if device.type == "cuda" else None
    verdicts: list[OperationReport] = []
    for proof in PROOFS.values():
        for dtype in proof.dtypes if proof.folder == args.folder else ():
            verdicts.append(judge(proof, dtype, args.seed, where, twin, args.largest))
            write_atomically(args.out, [json.dumps([asdict(verdict) for verdict in verdicts]).encode()], sync=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

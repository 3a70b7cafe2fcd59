"""Runs the checks that need a GPU. Each part ends within --seconds (450).

    python tools/gpu_check.py --part ops       # every CUDA kernel: correct, repeatable, speed; writes the record
    python tools/gpu_check.py --part steps     # speed of whole training steps (benchmarks/gpu_steps.py)
    python tools/gpu_check.py --part peers     # speed beside transformers and a plain model (benchmarks/gpu_peers.py)
    python tools/gpu_check.py --part nccl      # two or more GPUs: every kind of parallelism (benchmarks/gpu_ranks.py)

- `ops` builds the kernels if they do not load. It compares each kernel with an fp64 result and with the same kernel on
  the CPU, twice, on new random inputs. If compute-sanitizer is installed, it checks small shapes. Each kernel is timed
  against PyTorch, torch.compile and a memory copy of the same size.
- `ops` writes the record megatron/ops/gpu_verified.json. Commit this file.
  The kernels in the record are not verified again under `--kernels auto`.
- The other parts write gpu_check_PART.json. Flags after -- go to the benchmark: `--part peers -- --sizes 345M`.
- Each measurement is written at once, so an interrupted run keeps its measurements.
- `--device cpu` runs the same checks on the CPU, with small shapes, to test this tool.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.utils.command_line import integer, number, run_tool

RECORD = Path(__file__).resolve().parent.parent / "megatron" / "ops" / "gpu_verified.json"  # VERIFIED of ops/library.py


def check_ops(args: argparse.Namespace) -> int:
    from benchmarks.parts import gpu_ops

    return gpu_ops.check_ops(args)


def check_benchmark(args: argparse.Namespace) -> int:
    """Runs a benchmark, which writes its measurements to the record."""
    from benchmarks import gpu_peers, gpu_ranks, gpu_steps
    from benchmarks.parts import gpu_ops

    words = ["--device", args.device, "--seconds", str(args.seconds), "--json", str(args.out)]
    if args.device == "cpu" and args.part != "nccl":
        words += ["--sizes", "tiny"]
    main = {"steps": gpu_steps.main, "peers": gpu_peers.main, "nccl": gpu_ranks.main}[args.part]
    return main([*words, *args.more], gpu_ops.about_run(args))


PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ops": check_ops,
    "steps": check_benchmark,
    "peers": check_benchmark,
    "nccl": check_benchmark,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="ops")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=integer(0), help="seed of the inputs (default: a new one each time)")
    parser.add_argument(
        "--rounds", type=integer(0), default=20, help="repetitions of the timing of ops (20); 0: no timing"
    )
    parser.add_argument("--seconds", type=number, default=450, help="time limit of the part, in seconds (450)")
    parser.add_argument("--out", type=Path, help="file of the record (default for ops: beside the kernels)")
    parser.add_argument("--only-small", action="store_true", help="only compare, only small shapes, write nothing")
    parser.add_argument("more", nargs="*", help="after --: flags for the benchmark of steps, peers or nccl")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not gpu_is_there():
        parser.error("--device cuda: torch sees no GPU here; --device cpu checks the CPU kernels in the same way")
    if args.more and args.part == "ops":
        parser.error(f"{' '.join(args.more)}: --part ops takes no flags of a benchmark; remove them")
    if args.out is None:
        args.out = RECORD if args.part == "ops" else Path(f"gpu_check_{args.part}.json")
    if args.out == RECORD and args.device == "cpu" and not args.only_small:
        parser.error("--device cpu: the committed record is for a GPU; give another file with --out")
    if not os.access(args.out.resolve().parent, os.W_OK):
        parser.error(f"--out {args.out}: there is no writable folder {args.out.resolve().parent}; give another file")
    args.seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    return PARTS[args.part](args)


def gpu_is_there() -> bool:
    import torch  # imported here, so that --help and a misspelt flag need no torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(run_tool("gpu_check.py", main))

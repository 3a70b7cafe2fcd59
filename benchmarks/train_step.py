"""Compares a training step: ours, transformers' GPT-2, a nanoGPT-like model, its products, the CPU's peak.

    python benchmarks/train_step.py --dtype fp32 --steps 15
    python benchmarks/train_step.py --dtype bf16 --json result.json

A step is: zero the gradients, forward, loss, backward, clip to 1.0, AdamW, without dropout. Ours uses the real model,
gradient buffers, optimizer and CPU settings. In bf16 it keeps fp32 masters and fp32 gradients; the peers are bf16
throughout and run with torch's defaults. The floor is the time of the matrix products alone, with the faster of the
libraries that multiply in full precision. The peak does the products' operations in registers; nothing can be faster.

Every contender has a separate process, because the allocator and the matrix library are settings of a process. They
take turns, one step each per round. A ratio is the median over rounds of times within one round, as machines drift.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts.peak import peak_step
from benchmarks.parts.peers import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Place,
    Shape,
    Step,
    plain_step,
    transformers_step,
)
from benchmarks.parts.turns import Contenders, Turn, rotated, speed_over
from megatron.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.model import GPT, initialise
from megatron.ops import resolve
from megatron.optimizer import Optimizer
from megatron.utils.cpu import processor_name, set_allocator, set_fp32_products
from megatron.utils.half_products import set_half_products
from megatron.utils.process import peak_resident_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Task:
    """Inputs of every contender."""

    shape: Shape
    dtype: torch.dtype
    threads: int
    clock: str
    kernels: str


def ours_step(shape: Shape, dtype: torch.dtype, tokens: Tensor, labels: Tensor, kernels: str) -> Step:
    config = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.seq,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    ops = resolve(kernels, "cpu")
    model = GPT(config, vocab_size=shape.vocab, kernels=ops)
    initialise(model, 1)
    model.to(dtype).train()
    flat = any((ops.adamw, ops.wgrad_accumulation))
    grads = BucketStore(model.named_parameters(), Axis.single("dp"), flat=flat, accumulate=ops.wgrad_accumulation)
    if ops.wgrad_accumulation is not None:
        model.make.wgrads.connect(grads, model)
    settings = OptimizerConfig(clip_grad=CLIP, adam_beta1=BETAS[0], adam_beta2=BETAS[1])
    optimizer = Optimizer(grads, settings, PrecisionConfig(bf16=dtype == torch.bfloat16), kernels=ops)

    def step() -> Tensor:
        grads.zero()
        loss = model(tokens, labels=labels).sum() / labels.numel()
        loss.backward()
        grads.reduce()
        optimizer.step(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        return loss.detach()

    return step


def floor_step(shape: Shape, dtype: torch.dtype) -> Step:
    """Makes a step of only the matrix products, into allocated memory, with the full square of attention."""
    rows, hidden = shape.batch * shape.seq, shape.hidden
    head_dim = hidden // shape.heads

    def randn(*size: int) -> Tensor:
        return torch.randn(*size).to(dtype) * 0.1

    linears = []
    for inputs, outputs in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)):
        linears.append((randn(rows, inputs), randn(outputs, inputs), randn(rows, outputs)))
    head = (randn(rows, hidden), randn(shape.vocab, hidden), randn(rows, shape.vocab))
    query = randn(shape.batch * shape.heads, shape.seq, head_dim)
    scores = query @ query.transpose(1, 2)
    results = {id(t): torch.empty_like(t) for triple in [*linears, head] for t in triple}

    def products(x: Tensor, weight: Tensor, y: Tensor) -> None:
        torch.mm(x, weight.t(), out=results[id(y)])
        torch.mm(y, weight, out=results[id(x)])
        torch.mm(y.t(), x, out=results[id(weight)])

    def step() -> Tensor:
        for _ in range(shape.layers):
            for triple in linears:
                products(*triple)
            for _ in range(2):  # scores, and the gradient of the attention probabilities
                torch.bmm(query, query.transpose(1, 2), out=scores)
            for _ in range(4):  # output, and the gradients of value, query and key
                torch.bmm(scores, query)
        products(*head)
        return torch.zeros(())

    return step


@dataclass(frozen=True)
class Contender:
    """The maker of a step, and the settings of its process: those of a run, or torch's own."""

    make: Callable[[Task, Tensor, Tensor], Step]
    allocator: str = "system"
    products: str = "mkl"
    widens: bool | None = False  # True: bf16 is multiplied in fp32; None: chosen as in a run
    counts: str = ""  # peer or limit that the verdict uses; else it is only shown
    dtype: torch.dtype | None = None  # None: the task's


def _ours(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return ours_step(task.shape, task.dtype, tokens, labels, task.kernels)


def _transformers(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return transformers_step(task.shape, Place(task.dtype), lambda: (tokens, labels))


def _plain(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return plain_step(task.shape, Place(task.dtype), lambda: (tokens, labels))


def _compiled(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return plain_step(task.shape, Place(task.dtype, compiled=True), lambda: (tokens, labels))


def _floor(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return floor_step(task.shape, task.dtype)


def _peak(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return peak_step(task.shape, task.dtype, task.threads)


CONTENDERS = {
    "ours": Contender(_ours, "auto", "auto", None),
    "transformers": Contender(_transformers, counts="peer"),
    "plain": Contender(_plain, counts="peer"),
    "compiled": Contender(_compiled, counts="peer"),
    "floor": Contender(_floor, counts="floor"),
    "floor-auto": Contender(_floor, "auto", "auto", None, counts="floor"),
    "peak": Contender(_peak, counts="peak"),
    # Effect of single settings; run only if named.
    "ours-system": Contender(_ours, "system", "auto", None),
    "ours-mkl": Contender(_ours, "auto", "mkl", None),
    "ours-widened": Contender(_ours, "auto", "auto", True),  # as without bf16 instructions
    "ours-fp32": Contender(_ours, "auto", "auto", None, dtype=torch.float32),
    "plain-auto": Contender(_plain, "auto", "auto"),
}
USUAL = ("ours", "transformers", "plain", "compiled", "floor", "floor-auto", "peak")


def prepare(name: str, task: Task) -> Turn:
    """Prepares a contender in its process. Its turns return their time and the peak memory so far."""
    contender, clock = CONTENDERS[name], CLOCKS[task.clock]
    task = replace(task, dtype=contender.dtype or task.dtype)
    set_allocator(contender.allocator)
    products = set_fp32_products(contender.products)
    if task.dtype != torch.float32:
        products = f"{task.dtype} products: torch's own"
        if contender.widens is not False:
            products = set_half_products(task.dtype, (lambda: False) if contender.widens else None)
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    size = (task.shape.batch, task.shape.seq)
    tokens, labels = torch.randint(task.shape.vocab, size), torch.randint(task.shape.vocab, size)
    step = contender.make(task, tokens, labels)

    def turn(steps: int) -> dict[str, Any]:
        start = clock()
        for _ in range(steps):
            step().item()
        return {"seconds": clock() - start, "peak": peak_resident_bytes(), "products": products}

    return turn


def measure(
    contenders: Contenders, rounds: int, warmup: int
) -> tuple[dict[str, list[float]], dict[str, int], dict[str, str]]:
    """Measures each contender: seconds of every step, peak memory, and the library of its products."""
    times: dict[str, list[float]] = {name: [] for name in contenders.names}
    peaks: dict[str, int] = {}
    products: dict[str, str] = {}
    for number in range(-warmup, rounds):
        for name in rotated(contenders.names, number):
            measured = contenders.turn(name, 1)
            if measured is None:
                raise SystemExit(f"{name}: {contenders.left_out[name]}")
            peaks[name], products[name] = measured["peak"], measured["products"]
            if number >= 0:
                times[name].append(measured["seconds"])
    return times, peaks, products


def report(times: dict[str, list[float]], peaks: dict[str, int], tokens: int) -> dict[str, float]:
    """Prints medians and ratios. Returns the ratios of our speed to theirs."""
    print(f"{'':<14} {'ms/step':>9} {'tokens/s':>9} {'peak MiB':>9}   our speed / theirs")
    ratios = {}
    for name, samples in times.items():
        median = statistics.median(samples)
        ratios[name] = statistics.median(speed_over(times, name))
        print(f"{name:<14} {median * 1e3:>9.1f} {tokens / median:>9.0f} {peaks[name] >> 20:>9}   {ratios[name]:.3f}")
    for kind in ("peer", "floor", "peak"):
        named = [name for name in times if CONTENDERS[name].counts == kind]
        if named:
            fastest = min(named, key=lambda name: ratios[name])
            print(f"against the fastest {kind} ({fastest}): {ratios[fastest]:.3f}")
    return ratios


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--steps", type=int, default=11, help="measured rounds")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="clock; cpu is CPU time of the contender's process, for busy machines and 1 thread",
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kernels", default="auto", help="value of pretrain_gpt.py's --kernels")
    parser.add_argument(
        "--onednn-isa", help="instruction set that oneDNN may use (ONEDNN_MAX_CPU_ISA): AVX512_CORE, ..."
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=USUAL, help="contenders to run besides ours")
    parser.add_argument("--json", type=Path, help="file for times and ratios")
    return parser.parse_args()


def main() -> None:
    args = parse()
    shape = Shape(args.layers, args.hidden, args.heads, args.seq, args.vocab, args.batch)
    task = Task(shape, DTYPES[args.dtype], args.threads, args.clock, args.kernels)
    print(f"{shape}, {args.dtype}, {args.threads} threads, {args.clock} clock, torch {torch.__version__}")
    if args.onednn_isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = args.onednn_isa  # for the contenders' processes, which load oneDNN
    contenders = Contenders()
    try:
        for name in dict.fromkeys(["ours", *args.only]):
            contenders.start(name, partial(prepare, name, task))
            if contenders.answer(name) is None:
                print(f"{name}: left out: {contenders.left_out[name]}")
        times, peaks, products = measure(contenders, args.steps, args.warmup)
    finally:
        contenders.close()
    ratios = report(times, peaks, shape.batch * shape.seq)
    processor = processor_name() + (f", oneDNN limited to {args.onednn_isa}" if args.onednn_isa else "")
    print(f"on {processor}; products ran through")
    for name, line in products.items():
        print(f"{name:<14} {line}")
    if args.json is not None:
        result = {"shape": asdict(shape), "dtype": args.dtype, "seconds": times, "our_speed_over_theirs": ratios}
        result |= {"processor": processor, "products": products}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

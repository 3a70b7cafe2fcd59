"""One training step: ours, transformers' GPT-2, a nanoGPT-shaped plain model, and the floor of its matrix products.

    python benchmarks/train_step.py --dtype fp32 --steps 15
    python benchmarks/train_step.py --dtype bf16 --json result.json

A step is zero the gradients, forward, loss, backward, clip to 1.0, AdamW, without dropout. Ours goes through the real
model, gradient buffers, optimizer and CPU settings: in bf16 it keeps fp32 masters and fp32 gradients, the peers are
bf16 throughout. The peers run as their users run them; the floor is taken with each library that multiplies in full
precision, and the faster one counts.

Every contender lives in a process of its own, for the allocator and the library of products are settings of a process.
They take turns, one step each per round, and every ratio is the median over rounds of times taken within the same
round: machines drift, ratios do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config.sections import ModelConfig, OptimizerConfig, PrecisionConfig
from megatron.data_parallel import GradBuffers
from megatron.distributed.state import Axis
from megatron.model import GPT, initialise
from megatron.ops import resolve
from megatron.optimizer import build_optimizer
from megatron.parallelize.wgrads import send_weight_gradients
from megatron.utils.cpu import set_allocator, set_fp32_products
from megatron.utils.device import peak_resident_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BETAS, LEARNING_RATE, WEIGHT_DECAY, CLIP = (0.9, 0.95), 3e-4, 0.1, 1.0
Step = Callable[[], float]


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int


@dataclass(frozen=True)
class Task:
    """What every contender is given."""

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
    initialise(model, config, 1, shape.vocab)
    model.to(dtype).train()
    flat = any((ops.adamw, ops.wgrad_accumulation))
    grads = GradBuffers(model.named_parameters(), Axis.single("dp"), flat=flat, accumulate=ops.wgrad_accumulation)
    if ops.wgrad_accumulation is not None:
        send_weight_gradients(model, grads)
    settings = OptimizerConfig(clip_grad=CLIP, adam_beta1=BETAS[0], adam_beta2=BETAS[1])
    optimizer = build_optimizer(grads, settings, PrecisionConfig(bf16=dtype == torch.bfloat16), kernels=ops)

    def step() -> float:
        grads.zero()
        loss = model(tokens, labels=labels).sum() / labels.numel()
        loss.backward()
        grads.reduce()
        optimizer.step(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        return loss.item()

    return step


def peer_step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Step:
    """What a plain PyTorch loop does, at its best: fused AdamW, gradients dropped rather than zeroed."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.item()

    return step


def transformers_step(shape: Shape, dtype: torch.dtype, tokens: Tensor, labels: Tensor) -> Step | None:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return None
    settings: dict[str, Any] = {
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_positions": shape.seq,
        "vocab_size": shape.vocab,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**settings)
    model: nn.Module = GPT2LMHeadModel(config)
    model.to(dtype=dtype).train()
    return peer_step(model, lambda model: model(input_ids=tokens, labels=labels).loss)


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        parts = self.qkv(self.norm1(x)).split(hidden, dim=2)
        query, key, value = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in parts)
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(core.transpose(1, 2).contiguous().view(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """The shape of nanoGPT: one class, no options."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-1)


def floor_step(shape: Shape, dtype: torch.dtype) -> Step:
    """The step's matrix products and nothing else, into memory that is already there; attention as the full square."""
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

    def step() -> float:
        for _ in range(shape.layers):
            for triple in linears:
                products(*triple)
            for _ in range(2):  # scores and their gradient's partner
                torch.bmm(query, query.transpose(1, 2), out=scores)
            for _ in range(4):  # output, and the gradients of value, query and key
                torch.bmm(scores, query)
        products(*head)
        return 0.0

    return step


def plain_step(shape: Shape, dtype: torch.dtype, tokens: Tensor, labels: Tensor, *, compiled: bool) -> Step:
    model: Any = PlainGPT(shape).to(dtype)
    return peer_step(torch.compile(model) if compiled else model, lambda model: model(tokens, labels))


@dataclass(frozen=True)
class Contender:
    """How a step is made, and the settings of its process: those of a run, or torch's own."""

    make: Callable[[Task, Tensor, Tensor], Step | None]
    allocator: str = "system"
    products: str = "mkl"
    counts: str = ""  # as a peer or as the floor; else it is only shown


def _ours(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return ours_step(task.shape, task.dtype, tokens, labels, task.kernels)


def _transformers(task: Task, tokens: Tensor, labels: Tensor) -> Step | None:
    return transformers_step(task.shape, task.dtype, tokens, labels)


def _plain(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return plain_step(task.shape, task.dtype, tokens, labels, compiled=False)


def _compiled(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return plain_step(task.shape, task.dtype, tokens, labels, compiled=True)


def _floor(task: Task, tokens: Tensor, labels: Tensor) -> Step:
    return floor_step(task.shape, task.dtype)


CONTENDERS = {
    "ours": Contender(_ours, "auto", "auto"),
    "transformers": Contender(_transformers, counts="peer"),
    "plain": Contender(_plain, counts="peer"),
    "compiled": Contender(_compiled, counts="peer"),
    "floor": Contender(_floor, counts="floor"),
    "floor-auto": Contender(_floor, "auto", "auto", counts="floor"),
    # Of the settings, what each is worth: not run unless named.
    "ours-system": Contender(_ours, "system", "auto"),
    "ours-mkl": Contender(_ours, "auto", "mkl"),
    "plain-auto": Contender(_plain, "auto", "auto"),
}
USUAL = ("ours", "transformers", "plain", "compiled", "floor", "floor-auto")


def serve(name: str, task: Task, link: Connection) -> None:
    """A contender's process: answers every message with the time of one step and the peak memory so far."""
    contender = CONTENDERS[name]
    set_allocator(contender.allocator)
    set_fp32_products(contender.products)
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    size = (task.shape.batch, task.shape.seq)
    tokens, labels = torch.randint(task.shape.vocab, size), torch.randint(task.shape.vocab, size)
    step, clock = contender.make(task, tokens, labels), CLOCKS[task.clock]
    link.send(step is not None)
    while step is not None and link.recv():
        start = clock()
        step()
        link.send((clock() - start, peak_resident_bytes()))


class Runner:
    """The processes of the contenders that are installed."""

    def __init__(self, names: list[str], task: Task) -> None:
        self.links: dict[str, Connection] = {}
        self.peaks: dict[str, int] = {}
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for name in names:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(name, task, there), daemon=True)
            process.start()
            there.close()  # so that a contender that dies is an error here, not a wait
            self._processes.append(process)
            if here.recv():
                self.links[name] = here
            else:
                print(f"{name}: not installed, left out")

    def step(self, name: str) -> float:
        self.links[name].send(True)
        seconds, self.peaks[name] = self.links[name].recv()
        return float(seconds)

    def measure(self, rounds: int, warmup: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in self.links}
        for number in range(-warmup, rounds):
            names = list(self.links)
            for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody always follows the same
                seconds = self.step(name)
                if number >= 0:
                    times[name].append(seconds)
        return times

    def close(self) -> None:
        for link in self.links.values():
            link.send(False)
        for process in self._processes:
            process.join()


def report(times: dict[str, list[float]], peaks: dict[str, int], tokens: int) -> dict[str, float]:
    """Print medians and ratios; return the ratios of our speed to theirs."""
    print(f"{'':<14} {'ms/step':>9} {'tokens/s':>9} {'peak MiB':>9}   our speed / theirs")
    ratios = {}
    for name, samples in times.items():
        median = statistics.median(samples)
        ratios[name] = statistics.median(theirs / ours for theirs, ours in zip(samples, times["ours"], strict=True))
        print(f"{name:<14} {median * 1e3:>9.1f} {tokens / median:>9.0f} {peaks[name] >> 20:>9}   {ratios[name]:.3f}")
    for kind in ("peer", "floor"):
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
        "--clock", choices=CLOCKS, default="wall", help="cpu: of the contender's process; for a busy machine, 1 thread"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kernels", default="auto", help="as pretrain_gpt.py's --kernels")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=USUAL, help="contenders to run, besides ours")
    parser.add_argument("--json", type=Path, help="also write times and ratios here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    shape = Shape(args.layers, args.hidden, args.heads, args.seq, args.vocab, args.batch)
    task = Task(shape, DTYPES[args.dtype], args.threads, args.clock, args.kernels)
    print(f"{shape}, {args.dtype}, {args.threads} threads, {args.clock} clock, torch {torch.__version__}")
    runner = Runner(list(dict.fromkeys(["ours", *args.only])), task)
    times = runner.measure(args.steps, args.warmup)
    runner.close()
    ratios = report(times, runner.peaks, shape.batch * shape.seq)
    if args.json is not None:
        result = {"shape": asdict(shape), "dtype": args.dtype, "seconds": times, "our_speed_over_theirs": ratios}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

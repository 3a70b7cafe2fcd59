"""One training step: ours, transformers' GPT-2, a nanoGPT-shaped plain model, and the floor of its matrix products.

    python benchmarks/train_step.py --dtype fp32 --steps 15
    python benchmarks/train_step.py --dtype bf16 --json result.json

A step is zero the gradients, forward, loss, backward, clip to 1.0, AdamW, without dropout. Ours goes through the real
model, gradient buffers and optimizer: in bf16 it keeps fp32 masters and fp32 gradients, the peers are bf16 throughout.
The contenders take turns, one step each per round, and every ratio is the median over rounds of times taken within
the same round: machines drift, ratios do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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


def ours_step(shape: Shape, dtype: torch.dtype, tokens: Tensor, labels: Tensor, kernels: str) -> Step:
    config = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.seq,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPT(config, vocab_size=shape.vocab, kernels=resolve(kernels, "cpu"))
    initialise(model, config, 1, shape.vocab)
    model.to(dtype).train()
    grads = GradBuffers(model.named_parameters(), Axis.single("dp"))
    settings = OptimizerConfig(clip_grad=CLIP, adam_beta1=BETAS[0], adam_beta2=BETAS[1])
    optimizer = build_optimizer(grads, settings, PrecisionConfig(bf16=dtype == torch.bfloat16))

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


def measure(
    contenders: dict[str, Step], rounds: int, warmup: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    for _ in range(warmup):
        for step in contenders.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody always follows the same one
            start = clock()
            contenders[name]()
            times[name].append(clock() - start)
    return times


def report(times: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """Print medians and ratios; return the ratios of our speed to theirs."""
    print(f"{'':<14} {'ms/step':>9} {'tokens/s':>9}   our speed / theirs")
    ratios = {}
    for name, samples in times.items():
        median = statistics.median(samples)
        ratios[name] = statistics.median(theirs / ours for theirs, ours in zip(samples, times["ours"], strict=True))
        print(f"{name:<14} {median * 1e3:>9.1f} {tokens / median:>9.0f}   {ratios[name]:.3f}")
    peers = [name for name in times if name not in ("ours", "floor")]
    if peers:
        fastest = min(peers, key=lambda name: ratios[name])
        print(f"against the faster peer ({fastest}): {ratios[fastest]:.3f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--steps", type=int, default=11, help="measured rounds")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of this process; for a busy machine, 1 thread"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kernels", default="auto", help="as pretrain_gpt.py's --kernels")
    parser.add_argument("--only", nargs="+", help="contenders to run: ours, transformers, plain, floor")
    parser.add_argument("--json", type=Path, help="also write times and ratios here")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = Shape(args.layers, args.hidden, args.heads, args.seq, args.vocab, args.batch)
    dtype = DTYPES[args.dtype]
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq))
    labels = torch.randint(shape.vocab, (shape.batch, shape.seq))
    makers: dict[str, Callable[[], Step | None]] = {
        "ours": lambda: ours_step(shape, dtype, tokens, labels, args.kernels),
        "transformers": lambda: transformers_step(shape, dtype, tokens, labels),
        "plain": lambda: peer_step(PlainGPT(shape).to(dtype), lambda model: model(tokens, labels)),
        "floor": lambda: floor_step(shape, dtype),
    }
    contenders = {}
    for name, make in makers.items():
        if name == "ours" or args.only is None or name in args.only:
            step = make()
            if step is None:
                print(f"{name}: not installed, left out")
            else:
                contenders[name] = step
    print(f"{shape}, {args.dtype}, {args.threads} threads, {args.clock} clock, torch {torch.__version__}")
    times = measure(contenders, args.steps, args.warmup, CLOCKS[args.clock])
    ratios = report(times, shape.batch * shape.seq)
    if args.json is not None:
        result = {"shape": vars(shape), "dtype": args.dtype, "seconds": times, "our_speed_over_theirs": ratios}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Compares training steps on one GPU: ours, compiled transformers GPT-2, a compiled nanoGPT-like model.

    python benchmarks/gpu_peers.py --json peers.json           # 124M, 345M and the tutorial's 110M, within 450 s
    python benchmarks/gpu_peers.py --sizes 345M --only ours ours-compile compiled compiled-autocast
    python benchmarks/gpu_peers.py --sizes tiny --device cpu --rounds 2 --steps 2 --warm-up 1   # smoke test

Ours is pretrain_gpt.py with the flags of benchmarks/gpu_steps.py, including its loader. The peers are
benchmarks/parts/peers.py on batches of the same loader, with the same AdamW. All are bf16, without dropout.

Every contender has a separate process. In its turn it runs a few uncounted steps, then a timed block that begins and
ends with an idle device. Then it frees memory, because all share the device. A ratio is the median over rounds of times
within one round. A contender that does not fit, is not installed or takes too long is left out, with the reason. The
record is written after every round. The script ends before --seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_steps import NAMED, PEAK, Size, run_flags
from benchmarks.parts import peers
from benchmarks.parts.turns import Contenders, Turn, rotated, speed_over
from megatron.config import ModelConfig
from megatron.data.loader import build_loader
from megatron.data.mock import MockDataset
from megatron.data.sampler import BlockShape, single_batches
from megatron.layout import padded_vocab_size
from megatron.model.flops import flops_per_token
from megatron.utils.device import accelerator_memory
from megatron.utils.process import peak_resident_bytes

WAITS = (5.0, 10.0, 20.0, 30.0)  # seconds to wait for memory in the first steps, while others compile
SETTLING = 2  # uncounted steps of a turn, which allocate freed memory again
GETTING_READY = 0.8  # largest share of a size's time for starting; the rest is for measuring
ENDLESS = 10**6  # iterations, more than any contender runs
OPTIMIZER = (
    f"--lr {peers.LEARNING_RATE} --lr-decay-style constant --adam-beta1 {peers.BETAS[0]} --adam-beta2 {peers.BETAS[1]} "
    f"--weight-decay {peers.WEIGHT_DECAY} --clip-grad {peers.CLIP}"
)
Block = Callable[[int], float]
"""Makes this many steps, and returns the last loss."""


@dataclass(frozen=True)
class Task:
    size: Size
    device: str
    flags: str
    warm_up: int
    workers: int

    @property
    def vocab(self) -> int:
        """Padded vocabulary, so that all contenders compute the same products."""
        return padded_vocab_size(self.size.vocab, 128, 1)

    @property
    def shape(self) -> peers.Shape:
        size = self.size
        return peers.Shape(size.layers, size.hidden, size.heads, size.seq, self.vocab, size.micro_batch)

    @property
    def flops_per_token(self) -> float:
        size = self.size
        model = ModelConfig(num_layers=size.layers, hidden_size=size.hidden, num_attention_heads=size.heads)
        return flops_per_token(model, seq_length=size.seq, padded_vocab_size=self.vocab)


@dataclass(frozen=True)
class Ready:
    block: Block
    about: dict[str, Any] = field(default_factory=dict)
    rest: Callable[[], None] = lambda: None
    """Frees memory that is not needed between turns."""


@dataclass(frozen=True)
class Contender:
    prepare: Callable[[Task], Ready]
    compiles_all: bool = False
    """True if compiling makes its first step take a minute or more."""


def our_block(task: Task, extra: str = "") -> Ready:
    """Makes a block of the trainer of pretrain_gpt.py, and records its kernels."""
    from megatron.engine import GraphedPasses
    from megatron.pretrain import setup
    from megatron.training.assemble import assemble
    from pretrain_gpt import datasets_provider, forward_step, model_provider

    flags = run_flags(task.size, task.device, ENDLESS, log_interval=ENDLESS)
    words = [*flags, *shlex.split(OPTIMIZER), "--num-workers", str(task.workers), *shlex.split(f"{task.flags} {extra}")]
    with contextlib.redirect_stdout(io.StringIO()):
        run = setup(words)
        parts = assemble(run, datasets_provider, model_provider, forward_step)
    trainer = parts.trainer
    about: dict[str, Any] = {"kernels": {choice.op: choice.backend for choice in run.kernels.choices}}

    def block(steps: int) -> float:
        result = trainer.iterate(steps)
        if "host_waits" not in about:
            about["host_waits"] = host_waits(trainer.iterate) if run.device.type == "cuda" else []
        assert result is not None and not result.skipped
        return result.lm_loss

    def rest() -> None:
        if isinstance(trainer.engine.passes, GraphedPasses):
            trainer.engine.passes.forget()  # a CUDA graph holds the memory of a whole pass

    return Ready(block, about, rest)


def host_waits(step: Callable[[], object]) -> list[str]:
    """Returns the places of host syncs in two steps, from torch's sync-debug mode. There should be none."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in said if "called a synchronizing" in str(warning.message)]
    return sorted({f"{warning.filename}:{warning.lineno}" for warning in waits})


def peer_block(task: Task, make: Callable[..., peers.Step], **how: bool) -> Ready:
    """Makes a plain loop that reads its loss once per block."""
    torch.manual_seed(1)
    size, on_gpu = task.size, task.device != "cpu"
    data = MockDataset(size=ENDLESS, seq_length=size.seq, vocab_size=size.vocab, seed=1, split=0)
    batches = build_loader(
        data,
        single_batches(len(data), 0, BlockShape(micro_batch_size=size.micro_batch, dp_rank=0, dp_size=1)),
        num_workers=task.workers,
        pin_memory=on_gpu,
    )

    def next_batch() -> tuple[Tensor, Tensor]:
        batch = next(batches)
        return batch["tokens"].to(task.device, non_blocking=True), batch["labels"].to(task.device, non_blocking=True)

    step = make(task.shape, peers.Place(torch.bfloat16, task.device, **how), next_batch)

    def block(steps: int) -> float:
        for _ in range(steps):
            loss = step()
        return loss.item()

    return Ready(block)


TRANSFORMERS = partial(peer_block, make=peers.transformers_step)
PLAIN = partial(peer_block, make=peers.plain_step)
CONTENDERS = {
    "ours": Contender(our_block),
    "ours-graphs": Contender(partial(our_block, extra="--cuda-graphs")),
    "ours-compile": Contender(partial(our_block, extra="--compile")),
    "transformers": Contender(partial(TRANSFORMERS, compiled=True), compiles_all=True),
    "compiled": Contender(partial(PLAIN, compiled=True), compiles_all=True),
    # Run only if named: fp32 weights, as in nanoGPT, and a version without a compiler.
    "transformers-autocast": Contender(partial(TRANSFORMERS, compiled=True, autocast=True), compiles_all=True),
    "compiled-autocast": Contender(partial(PLAIN, compiled=True, autocast=True), compiles_all=True),
    "plain": Contender(PLAIN),
    "ours-native": Contender(partial(our_block, extra="--kernels native")),
}
USUAL = ("ours", "ours-graphs", "ours-compile", "transformers", "compiled")


def prepare(name: str, task: Task) -> Turn:
    """Prepares a contender in its process. The first turn only warms up."""
    ready = CONTENDERS[name].prepare(task)
    block, about = ready.block, ready.about
    on_gpu = task.device != "cpu"
    warm = False

    def turn(steps: int) -> dict[str, Any]:
        nonlocal warm
        if warm:
            block(SETTLING)
        else:
            first_steps(block, task.warm_up)
        if on_gpu:
            torch.accelerator.synchronize()
            if not warm:
                torch.accelerator.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = block(steps)
        if on_gpu:
            torch.accelerator.synchronize()
        seconds = (time.perf_counter() - start) / steps
        memory = accelerator_memory(torch.device(task.device)).get("max_allocated", peak_resident_bytes())
        ready.rest()
        if on_gpu:
            torch.accelerator.empty_cache()
        warm = True
        return {"seconds": seconds, "loss": loss, "peak_bytes": memory, **about}

    return turn


def first_steps(block: Block, steps: int, sleep: Callable[[float], None] = time.sleep) -> None:
    """Runs the first steps, and retries if other contenders take the memory. Compiled code is kept between tries."""
    for seconds in WAITS:
        with contextlib.suppress(torch.OutOfMemoryError):
            block(steps)
            return
        torch.accelerator.empty_cache()
        sleep(seconds)
    block(steps)


# ---------------------------------------------------------------- a size


def get_ready(contenders: Contenders, names: Sequence[str], task: Task, steps: int, until: float) -> None:
    """Starts all contenders. Those that compile the whole model run their first steps at the same time. Meanwhile the
    others run their first steps one after another, because memory does not suffice for all of them together."""
    slow = [name for name in names if CONTENDERS[name].compiles_all]
    quick = [name for name in names if name not in slow]
    for name in (*slow, *quick):
        contenders.start(name, partial(prepare, name, task))
    for name in slow:
        contenders.ask(name, steps)
    for name in (*quick, *slow):
        if contenders.answer(name, until - time.monotonic()) is not None:
            if name in quick:
                contenders.ask(name, steps)
            contenders.answer(name, until - time.monotonic())
        said = contenders.left_out.get(name)
        print(f"{task.size.name}: {name}: {f'left out: {said}' if said else 'ready'}", flush=True)


def compare(
    task: Task, names: Sequence[str], rounds: int, steps: int, until: float, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Runs at most `rounds` rounds, until the time `until`. Passes the result so far to `save` after each round."""
    begun = time.monotonic()
    contenders = Contenders()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        get_ready(contenders, names, task, steps, begun + GETTING_READY * (until - begun))
        longest = 0.0
        for number in range(rounds):
            start = time.monotonic()
            if start + longest > until:
                break
            for name in rotated(contenders.names, number):
                if (answer := contenders.turn(name, steps, until - time.monotonic())) is not None:
                    measured[name].append(answer)
            longest = max(longest, time.monotonic() - start)
            save(summary(task, measured, contenders.left_out))
    finally:
        contenders.close()
    return summary(task, measured, contenders.left_out)


def summary(task: Task, measured: Mapping[str, list[dict[str, Any]]], left_out: Mapping[str, str]) -> dict[str, Any]:
    times = {name: [turn["seconds"] for turn in turns] for name, turns in measured.items() if turns}
    tokens = task.size.micro_batch * task.size.seq
    found = {}
    for name, samples in times.items():
        seconds = statistics.median(samples)
        tflops = tokens / seconds * task.flops_per_token / 1e12
        ratios = speed_over(times, name)
        found[name] = {
            **measured[name][-1],
            "blocks": samples,
            "ms": 1e3 * seconds,
            "tokens_per_second": tokens / seconds,
            "samples_per_second": task.size.micro_batch / seconds,
            "tflops": tflops,
            "utilisation": tflops * 1e12 / PEAK,
            "peak_bytes": max(turn["peak_bytes"] for turn in measured[name]),
            "our_speed_over_theirs": statistics.median(ratios) if ratios else None,
        }
    return {"size": task.size.name, "contenders": found, "left_out": dict(left_out)}


def table(size: Size, result: dict[str, Any]) -> str:
    lines = [
        f"{size.name:<22} {'ms/step':>8} {'tokens/s':>9} {'samples/s':>9} {'TFLOP/s':>8} {'of 989':>7} {'peak GiB':>8} "
        f"{'loss':>7}   our speed / theirs"
    ]
    for name, found in result["contenders"].items():
        ratio = found["our_speed_over_theirs"]
        lines.append(
            f"{name:<22} {found['ms']:>8.1f} {found['tokens_per_second']:>9.0f} {found['samples_per_second']:>9.1f} "
            f"{found['tflops']:>8.1f} {found['utilisation']:>7.1%} {found['peak_bytes'] / 2**30:>8.1f} "
            f"{found['loss']:>7.3f}   {'-' if ratio is None else format(ratio, '.3f')}"
        )
    lines += [f"{name:<22} left out: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join([*lines, *verdicts(size, result["contenders"])])


def verdicts(size: Size, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Compares our fastest contender with the fastest peer and with published numbers."""
    ours, theirs = ([name for name in found if name.startswith("ours") is own] for own in (True, False))
    waits = {name: found[name]["host_waits"] for name in ours if found[name].get("host_waits")}
    lines = [f"{name}: a step has host syncs: {', '.join(places)}" for name, places in waits.items()]
    if ours and theirs:
        mine, peer = (min(names, key=lambda name: found[name]["ms"]) for names in (ours, theirs))
        ratio = found[peer]["ms"] / found[mine]["ms"]
        lines.append(f"{mine} against {peer}, the fastest peer: {ratio:.3f}x: {'ahead' if ratio > 1 else 'BEHIND'}")
    if ours and size.published_tokens is not None:
        mine = min(ours, key=lambda name: found[name]["ms"])
        ratio = found[mine]["tokens_per_second"] / size.published_tokens
        lines.append(f"{mine}: {ratio:.2f}x of the published result: {size.published}")
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=NAMED, default=["124M", "345M", "110M"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=USUAL, help="contenders to run besides ours")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--flags", default="", help='more flags for all our contenders, as in --flags="--kernels native"'
    )
    parser.add_argument("--rounds", type=int, default=6, help="largest number of rounds, if the time allows")
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before the first block")
    parser.add_argument("--workers", type=int, default=2, help="data-loading processes per contender")
    parser.add_argument("--seconds", type=float, default=450, help="time limit of the whole script")
    parser.add_argument("--json", type=Path, help="file for the results, written after every round")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, about: Mapping[str, Any] | None = None) -> int:
    """Runs the benchmark. `about`: further entries of the record."""
    args = parse(arguments)
    until = time.monotonic() + args.seconds
    names = list(dict.fromkeys(["ours", *args.only]))
    results: list[dict[str, Any]] = []

    def save(result: dict[str, Any]) -> None:
        if args.json is not None:
            record = {**(about or {}), "flags": args.flags, "results": [*results, result]}
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    for number, name in enumerate(args.sizes):
        task = Task(NAMED[name], args.device, args.flags, args.warm_up, args.workers)
        now = time.monotonic()
        share = now + (until - now) / (len(args.sizes) - number)
        result = compare(task, names, args.rounds, args.steps, share, save)
        save(result)
        results.append(result)
        print(table(NAMED[name], result), flush=True)
    return int(any("ours" not in result["contenders"] for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""Compares an evaluation's tokens per second with `transformers` on the same weights.

    python benchmarks/evaluate.py                  # perplexity and multiple choice, about five minutes on two cores

Both score the same rows with the same model: overlapping windows of a text, and choices of short contexts. The peer
sorts rows by length, pads batches, and gathers from the log-softmax of the logits. Each contender has a separate
process, and they take turns. Padding does not count as tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from benchmarks.parts import turns
from benchmarks.parts.turns import Turn, speed_over
from megatron.evaluation.sequences import Scored, windows

WINDOW, BATCH, VOCABULARY = 512, 8, 50257


def rows_of(work: str, count: int) -> list[Scored]:
    """Makes rows of random ids, because the cost does not depend on them."""
    random = np.random.default_rng(1)
    if work == "perplexity":
        return list(windows(random.integers(0, VOCABULARY, 1 + count * WINDOW // 2), WINDOW, WINDOW // 2))
    lengths = [(int(random.integers(20, 120)), int(random.integers(1, 16))) for _ in range(8 * count)]
    return [Scored(random.integers(0, VOCABULARY, context + target), context) for context, target in lengths]


def make_model(folder: Path, layers: int, hidden: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    shape = {"n_layer": layers, "n_embd": hidden, "n_head": hidden // 64, "n_positions": WINDOW}
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape)).save_pretrained(folder)


def ours(folder: Path, threads: int) -> Callable[[list[Scored]], np.ndarray]:
    from megatron.evaluation.scorer import scorer_of
    from megatron.inference.model import ModelOptions, open_subject

    subject = open_subject(ModelOptions(load=str(folder), device="cpu", seq_length=WINDOW, batch_size=BATCH))
    torch.set_num_threads(threads)
    scorer = scorer_of(subject)
    return lambda rows: scorer.score(rows).logprobs


def theirs(folder: Path, threads: int) -> Callable[[list[Scored]], np.ndarray]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def score(rows: list[Scored]) -> np.ndarray:
        sums, order = np.zeros(len(rows)), sorted(range(len(rows)), key=lambda number: -rows[number].length)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            longest = rows[batch[0]].length
            tokens = torch.zeros(len(batch), longest + 1, dtype=torch.int64)
            for place, number in enumerate(batch):
                tokens[place, : rows[number].length + 1] = torch.from_numpy(rows[number].tokens)
            logprobs = model(tokens[:, :-1]).logits.log_softmax(-1)
            found = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
            for place, number in enumerate(batch):
                sums[number] = float(found[place, rows[number].first - 1 : rows[number].length].double().sum())
        return sums

    return score


CONTENDERS = {"ours": ours, "transformers": theirs}


def prepare(name: str, folder: Path, threads: int, rows: list[Scored]) -> Turn:
    score = CONTENDERS[name](folder, threads)

    def turn(_: int) -> dict[str, Any]:
        started = time.perf_counter()
        found = score(rows)
        return {"seconds": time.perf_counter() - started, "sum": float(found.sum())}

    return turn


def race(work: str, args: argparse.Namespace, folder: Path) -> float:
    """Runs the contenders in turns. Returns the ratio of our speed to that of `transformers`."""
    rows = rows_of(work, args.rows)
    tokens = sum(row.length for row in rows)
    contenders = {name: partial(prepare, name, folder, args.threads, rows) for name in CONTENDERS}
    times, last = turns.race(contenders, args.rounds)
    sums = {name: measured["sum"] for name, measured in last.items()}
    if abs(sums["ours"] / sums["transformers"] - 1) > 1e-4:
        raise SystemExit(f"{work}: the sums differ: {sums}")
    ratio = statistics.median(speed_over(times, "transformers"))
    for name, samples in times.items():
        print(f"{work:<11} {name:<13} {tokens / statistics.median(samples):>8.0f} tokens/s")
    print(f"{work:<11} our speed / theirs {ratio:.2f}")
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=16, help="windows of a text; eight times as many choices (16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    print(f"{args.layers} layers of {args.hidden_size}, window {WINDOW}, fp32, {args.threads} threads")
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), args.layers, args.hidden_size)
        for work in ("perplexity", "choices"):
            race(work, args, Path(name))


if __name__ == "__main__":
    main()

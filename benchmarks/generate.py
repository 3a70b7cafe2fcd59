"""Compares greedy generation's tokens per second with `transformers.generate()` on the same weights.

    python benchmarks/generate.py                  # GPT-2 small and a Llama of its size, batches of 1 and 8, fp32

Each contender has a separate process, and they take turns. The third contender is the limit: only the matrix products
of a step with that many rows, once per token. Our packed copies of the weights are made before the clock starts,
because the tool makes them once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from benchmarks.parts import turns
from benchmarks.parts.turns import Turn, speed_over

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(family: str, folder: Path, args: argparse.Namespace) -> None:
    import transformers

    torch.manual_seed(1)
    layers, hidden, heads = args.layers, args.hidden_size, args.hidden_size // 64
    if family == "gpt2":
        shape = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": args.prompt + args.new}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=args.vocabulary, **shape))
    else:
        config = transformers.LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            max_position_embeddings=args.prompt + args.new,
        )
        model = transformers.LlamaForCausalLM(config)
    model.to(DTYPES[args.dtype]).save_pretrained(folder)


def ours(folder: Path, args: argparse.Namespace) -> Generate:
    from megatron.inference.decoder import Decoder
    from megatron.inference.generate import generate
    from megatron.inference.model import ModelOptions, open_subject
    from megatron.inference.packed import packed_weights

    subject = open_subject(ModelOptions(load=str(folder), device="cpu"))
    torch.set_num_threads(args.threads)
    decoder, kept = Decoder(subject.model, subject.passes, subject.run.parallel), ExitStack()
    kept.enter_context(packed_weights(subject.model, subject.run.log.info))

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        assert kept is not None, "the packed weights live as long as this function"
        return [list(found.tokens) for found in generate(decoder, prompts, max_new_tokens=new)]

    return run


def theirs(folder: Path, args: argparse.Namespace) -> Generate:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[args.dtype]).eval()

    @torch.inference_mode()
    def run(prompts: Prompts, new: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :].tolist()

    return run


def limit(folder: Path, args: argparse.Namespace) -> Generate:
    """Returns a function that computes only the matrix products of a generation."""
    from transformers import AutoModelForCausalLM

    from megatron.ops import resolve
    from megatron.ops.packed import PackedWeight

    kernels = resolve("auto", "cpu")
    few_rows = kernels.few_rows if kernels.backend("few_rows") == "native" else None
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[args.dtype])
    rows = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2 and "wpe" not in name}
    if not model.config.tie_word_embeddings:
        del rows["model.embed_tokens.weight"]
    conv = {name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    weights = [w.t().contiguous() if name.removesuffix(".weight") in conv else w for name, w in rows.items()]
    packed = [(PackedWeight(weight, few_rows), weight.shape[1]) for weight in weights]

    @torch.inference_mode()
    def run(prompts: Prompts, new: int) -> list[list[int]]:
        x = {width: torch.zeros(len(prompts), width, dtype=DTYPES[args.dtype]) for _, width in packed}
        for _ in range(new):
            for weight, width in packed:
                weight(x[width], None)
        return []

    return run


CONTENDERS = {"ours": ours, "transformers": theirs, "limit": limit}


def prepare(name: str, folder: Path, args: argparse.Namespace, batch: int) -> Turn:
    generate = CONTENDERS[name](folder, args)
    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(args.vocabulary, (batch, args.prompt), generator=random).tolist()

    def turn(_: int) -> dict[str, Any]:
        started = time.perf_counter()
        found = generate(prompts, args.new)
        return {"seconds": time.perf_counter() - started, "tokens": found}

    return turn


def race(family: str, batch: int, folder: Path, args: argparse.Namespace) -> None:
    contenders = {name: partial(prepare, name, folder, args, batch) for name in CONTENDERS}
    times, last = turns.race(contenders, args.rounds)
    tokens = {name: measured["tokens"] for name, measured in last.items()}
    rows = zip(tokens["ours"], tokens["transformers"], strict=True)
    same = statistics.mean(a == b for ours, theirs in rows for a, b in zip(ours, theirs, strict=True))
    for name, samples in times.items():
        print(f"{family:<5} batch {batch}  {name:<13} {batch * args.new / statistics.median(samples):>8.1f} tokens/s")
    ratio, of_limit = (statistics.median(speed_over(times, other)) for other in ("transformers", "limit"))
    print(f"{family:<5} batch {batch}  our speed / theirs {ratio:.2f}, / limit {of_limit:.2f}; equal tokens {same:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=("gpt2", "llama"), default=["gpt2", "llama"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("--new", type=int, default=128, help="number of generated tokens (128)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    lengths = f"{args.prompt} + {args.new} tokens"
    print(f"{args.layers} layers of {args.hidden_size}, {lengths}, {args.dtype}, {args.threads} threads")
    for family in args.families:
        with tempfile.TemporaryDirectory() as name:
            make_model(family, Path(name), args)
            for batch in args.batches:
                race(family, batch, Path(name), args)


if __name__ == "__main__":
    main()

"""The command line of tools/generate.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.utils.command_line import Parser, run_tool


def parser() -> Parser:
    p = Parser(
        prog="generate.py", description="Continue text with a trained checkpoint; model and tokenizer come from it."
    )
    p.add_argument("--load", type=Path, required=True, help="Checkpoint directory of a run (its --save).")
    p.add_argument("--ckpt-step", type=int, help="This iteration instead of the newest.")
    p.add_argument("--prompt", action="append", required=True, help="Text to continue; may be given several times.")
    p.add_argument(
        "--max-new-tokens", type=int, help="Tokens to add at most (default 64, or what the model has room for)."
    )
    p.add_argument("--greedy", action="store_true", help="Always the likeliest token.")
    p.add_argument("--temperature", type=float, default=1.0, help="Below 1: safer; above 1: wilder (default 1).")
    p.add_argument("--top-k", type=int, default=0, help="Draw from the K likeliest tokens only (default 0: all).")
    p.add_argument("--top-p", type=float, default=0.0, help="Draw from the likeliest tokens that hold this share.")
    p.add_argument("--seed", type=int, default=1234, help="The same seed gives the same text (default 1234).")
    p.add_argument("--ignore-eod", action="store_true", help="Go on after the end of the document.")
    p.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as trained).")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default auto).")
    p.add_argument("--kernels", default="auto", help="As in training (default auto).")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool("error", lambda: run(parser().parse_known_flags(argv)))


def run(arguments: argparse.Namespace) -> None:
    from megatron.inference.sampling import Sampling

    sampling = Sampling(
        greedy=arguments.greedy,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    if arguments.greedy and (arguments.top_k or arguments.top_p or arguments.temperature != 1.0):
        raise ConfigError(
            "--greedy: nothing is drawn, so --temperature, --top-k and --top-p do nothing; leave them out"
        )

    from megatron.distributed.device import resolve_device
    from megatron.inference.generate import generate
    from megatron.inference.load import load_model

    loaded = load_model(
        arguments.load,
        device=resolve_device(arguments.device),
        step=arguments.ckpt_step,
        dtype=arguments.dtype,
        kernels=arguments.kernels,
        log=lambda text: print(text, file=sys.stderr),
    )
    prompts = [loaded.tokenizer.tokenize(text) for text in arguments.prompt]
    found = generate(
        loaded.model,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        eod_id=None if arguments.ignore_eod else loaded.tokenizer.eod_id,
    )
    for prompt, continuation in zip(prompts, found, strict=True):
        print(loaded.tokenizer.detokenize([*prompt, *continuation.tokens]), flush=True)

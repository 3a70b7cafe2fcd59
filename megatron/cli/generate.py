"""The command line of tools/generate.py."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import megatron_anywhere
from megatron.cli.model_flags import add_model_flags
from megatron.errors import ConfigError
from megatron.training.exit import StopReason, run_as_program
from megatron.utils.command_line import Parser, fields_from, integer, number
from megatron.utils.loading import loading_torch
from megatron.utils.numerals import INT32

if TYPE_CHECKING:
    from megatron.inference.sampling import Sampling

_FIRST_SCREEN = """\
Continues texts with a trained model. Under torchrun, parallel-size flags split
the model, and data-parallel ranks share the prompts.

  python tools/generate.py --load checkpoints --prompt "Once upon a time" \\
    --max-new-tokens 64 --temperature 0.8 --top-p 0.95

Flags that most runs need:
  --load PATH               a --save folder, a Hugging Face or Megatron model
  --prompt TEXT             text to continue; may be given several times
  --prompts FILE            JSON lines, or a prompt in each line; - is stdin
  --max-new-tokens N        most tokens to add (default: 64)
  --temperature X, --top-k K, --top-p P, --seed N, --greedy
                            sampling of the tokens
  --stop TEXT               ends before this text
  --chat                    prompts are conversations
  --output FILE             writes JSON lines instead of printing

"""


def parser() -> Parser:
    p = Parser(prog="generate.py", first_screen=_FIRST_SCREEN)
    _add_prompt_flags(p.add_argument_group("prompts"))
    _add_stopping_flags(p.add_argument_group("stopping"))
    _add_sampling_flags(p.add_argument_group("sampling"))
    add_model_flags(p, batch="Prompts at a time", axes=("tensor-model", "pipeline-model", "expert-model"))
    return p


def _add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", action="append", default=[], help="Text to continue; may be given several times.")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="Texts to continue: JSON lines (.jsonl, .json), or one in each line; - is standard input (the default).",
    )
    group.add_argument("--json-key", default="prompt", help="JSON key of the prompt (default prompt).")
    group.add_argument(
        "--truncate-prompts",
        action="store_true",
        help="Drop the beginning of prompts that are longer than the model's positions.",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="Prompts are conversations, formatted by the model's chat template: a text is one user message, a JSON "
        "line has messages. Special tokens in messages are plain text.",
    )
    group.add_argument(
        "--prompt-with-special-tokens",
        action="store_true",
        help="Encode special tokens in prompts as such (default: as plain text, as in documents).",
    )
    group.add_argument(
        "--output", metavar="FILE", help="Write JSON lines to this file, atomically, instead of printing."
    )
    group.add_argument("--logprobs", action="store_true", help="Log-probability of every token (with --output).")


def _add_stopping_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-new-tokens",
        type=integer(1, INT32),
        metavar="N",
        help="Most tokens to add (default 64, or the positions that are left).",
    )
    group.add_argument(
        "--stop", action="append", default=[], help="End the output before this text; may be given several times."
    )
    group.add_argument("--ignore-eod", action="store_true", help="Continue after an end-of-document token.")


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--greedy", action="store_true", help="Take the most probable token each time.")
    group.add_argument(
        "--temperature",
        type=number,
        default=1.0,
        help="Divides the logits: below 1 sharpens, above 1 flattens the distribution (default 1).",
    )
    group.add_argument(
        "--top-k", type=integer(0), default=0, help="Sample from the K most probable tokens (default 0: all)."
    )
    group.add_argument(
        "--top-p",
        type=number,
        default=0.0,
        help="Sample from the most probable tokens that together have this probability.",
    )
    group.add_argument(
        "--seed", type=integer(0), default=1234, help="Seed of the sampling; the same seed gives the same text (1234)."
    )
    group.add_argument("--num-beams", type=integer(1, 4096), default=1, metavar="N", help="Beam search with N beams.")
    group.add_argument(
        "--length-penalty",
        type=number,
        default=1.0,
        help="Exponent of the length in beam search; larger values favour long texts (default 1).",
    )


def main(argv: Sequence[str] | None = None) -> int:
    def body() -> StopReason:
        given = parser().parse_known_flags(argv)
        check_sampling_flags(given)
        with loading_torch():
            from megatron.inference.model import ModelOptions
            from megatron.inference.run import GenerateOptions, answer_prompts
            from megatron.interop.source import OTHER_PROGRAMS

        answer_prompts(
            GenerateOptions(**fields_from(given, GenerateOptions)),
            ModelOptions(**fields_from(given, ModelOptions)),
            sampling(given),
            OTHER_PROGRAMS,
        )
        return StopReason("done", "the texts")

    run_as_program(body)
    return 0


def sampling(given: argparse.Namespace) -> "Sampling":
    from megatron.inference.sampling import Sampling

    return Sampling(**fields_from(given, Sampling))


_NOT_WITH_CHAT = {
    "json_key": "with --chat, the key is always messages, as with --sft",
    "truncate_prompts": "a chat template cannot format a conversation without its beginning",
    "prompt_with_special_tokens": "the chat template writes the special tokens; messages are text",
}


def check_sampling_flags(given: argparse.Namespace) -> None:
    """Rejects flags that do not fit together, as far as this can be checked without torch."""
    if given.greedy and (given.top_k or given.top_p or given.temperature != 1.0):
        raise ConfigError("--greedy: with this flag, --temperature, --top-k and --top-p have no effect; remove them")
    if given.num_beams > 1 and (given.greedy or given.top_k or given.top_p or given.temperature != 1.0):
        raise ConfigError(
            f"--num-beams {given.num_beams}: beam search does not sample; remove --greedy, --temperature, --top-k "
            "and --top-p"
        )
    if given.num_beams > 1 and given.stop:
        raise ConfigError(f"--num-beams {given.num_beams}: --stop does not work with beam search; remove one of them")
    if given.num_beams == 1 and given.length_penalty != 1.0:
        raise ConfigError(
            f"--length-penalty {given.length_penalty}: has no effect without beam search; give --num-beams 2 or more"
        )
    if not -10 <= given.length_penalty <= 10:
        raise ConfigError(f"--length-penalty {given.length_penalty}: must be from -10 to 10")
    if given.prompt and given.prompts is not None:
        raise ConfigError("--prompt: --prompts is given too; give one of them")
    if given.json_key != "prompt" and not str(given.prompts).endswith((".jsonl", ".json")):
        raise ConfigError(
            "--json-key: has no effect unless --prompts is a file of JSON lines (.jsonl, .json); remove the flag"
        )
    if given.chat:
        for flag, why in _NOT_WITH_CHAT.items():
            if getattr(given, flag) not in (False, "prompt"):
                raise ConfigError(f"--{flag.replace('_', '-')}: {why}; remove this flag or --chat")
    if given.logprobs and given.output is None:
        raise ConfigError("--logprobs: has no effect without --output FILE; add --output")
    if "" in given.stop:
        raise ConfigError("--stop: the text is empty and would end the output at once; give a text")


if __name__ == "__main__":
    sys.exit(megatron_anywhere.generate())

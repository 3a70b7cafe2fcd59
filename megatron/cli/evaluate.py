"""The command line of tools/evaluate.py."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import megatron_anywhere
from megatron.cli.model_flags import add_model_flags
from megatron.errors import ConfigError
from megatron.training.exit import StopReason, run_as_program
from megatron.utils.command_line import Parser, fields_from, integer
from megatron.utils.loading import loading_torch

if TYPE_CHECKING:
    from megatron.evaluation.run import TaskOptions

TASKS = ("perplexity", "lambada", "choices")


def parser() -> Parser:
    p = Parser(
        prog="evaluate.py",
        description="Evaluates a trained model: perplexity of a text, LAMBADA, or multiple choice. Under torchrun, "
        "parallel-size flags split the model, and data-parallel ranks share the work.",
    )
    what = p.add_argument_group("what")
    what.add_argument("--task", choices=TASKS, default="perplexity", help="Measure to compute (default perplexity).")
    what.add_argument(
        "--data", required=True, metavar="FILE", help="A text, JSON lines (.jsonl, .json), or the prefix of .bin/.idx."
    )
    what.add_argument("--json-key", default="text", help="JSON key of the text (default text).")
    what.add_argument(
        "--detokenize",
        choices=("wikitext",),
        help="Undo the tokenisation of WikiText's files, and count its words as the published perplexities do.",
    )
    what.add_argument(
        "--overlapping-eval",
        type=integer(1),
        metavar="N",
        help="Stride of the windows in tokens. A window scores only its new tokens (default: the window length).",
    )
    what.add_argument(
        "--score-first-token",
        action="store_true",
        help="Score the first token of a document too, predicted from an end-of-document token.",
    )
    what.add_argument(
        "--strict-lambada", action="store_true", help="Require all tokens of the last word, not only the last token."
    )
    what.add_argument(
        "--truncate-prompts", action="store_true", help="Drop the beginning of prompts that are longer than the window."
    )
    what.add_argument("--output", metavar="FILE", help="Write the results as JSON.")
    axes = ("tensor-model", "pipeline-model", "context", "expert-model")
    how = add_model_flags(p, batch="Whole windows per pass", axes=axes)
    how.add_argument("--seq-length", type=integer(1), metavar="N", help="Length of the window (default: as trained).")
    return p


def task_options(given: argparse.Namespace) -> "TaskOptions":
    from megatron.evaluation.run import TaskOptions

    used = {
        "perplexity": ("json_key", "detokenize", "overlapping_eval", "score_first_token"),
        "lambada": ("json_key", "strict_lambada", "truncate_prompts"),
        "choices": ("truncate_prompts",),
    }
    defaults = {field.name: field.default for field in dataclasses.fields(TaskOptions)}
    for name in set().union(*used.values()) - set(used[given.task]):
        if getattr(given, name) != defaults[name]:
            raise ConfigError(f"--{name.replace('_', '-')}: has no effect on --task {given.task}; remove the flag")
    return TaskOptions(**fields_from(given, TaskOptions))


def main(argv: Sequence[str] | None = None) -> int:
    def body() -> StopReason:
        given = parser().parse_known_flags(argv)
        with loading_torch():
            from megatron.evaluation.run import evaluate
            from megatron.inference.model import ModelOptions
            from megatron.interop.source import OTHER_PROGRAMS

        evaluate(ModelOptions(**fields_from(given, ModelOptions)), task_options(given), OTHER_PROGRAMS)
        return StopReason("done", f"--task {given.task}")

    run_as_program(body)
    return 0


if __name__ == "__main__":
    sys.exit(megatron_anywhere.evaluate())

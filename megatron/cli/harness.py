"""The command line of tools/harness.py: runs EleutherAI's harness with the model type `megatron`."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout

from megatron.training.exit import StopReason, rank_of_process, run_as_program
from megatron.utils.loading import loading_torch

_WRITING = {"--output_path": True, "-o": True, "--log_samples": False, "-s": False}
"""Flags of the harness that write files -> True if the flag takes a value. Only rank 0 gets these flags."""


_USAGE = """\
usage: harness.py --model megatron --model_args load=DIR[,seq_length=N,dtype=T,...] --tasks TASK[,TASK...] [...]

Runs EleutherAI's harness (the package lm_eval) on a checkpoint. model_args are the model flags of evaluate.py without
dashes. All other flags are the harness's own: see `lm_eval run --help`."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        print(_USAGE)
        return 0

    def body() -> StopReason:
        with loading_torch():
            from megatron.evaluation.harness import cli_evaluate, offer_model
            from megatron.interop.source import OTHER_PROGRAMS

        with ExitStack() as closing:
            main_rank = rank_of_process() == 0
            if not main_rank:  # every rank gets every request; the first one prints the results
                closing.enter_context(redirect_stdout(closing.enter_context(open(os.devnull, "w"))))
            sys.argv = ["lm_eval", *(words if main_rank else without_files(words))]
            offer_model(OTHER_PROGRAMS)
            cli_evaluate()
        return StopReason("done", "the harness")

    run_as_program(body)
    return 0


def without_files(words: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif flag in _WRITING:
            skip = _WRITING[flag] and not equals
        else:
            kept.append(word)
    return kept

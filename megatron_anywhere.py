"""The first import of every command. Ends the program with exit code 2 where it cannot run.

That is a Python that is too old, a regular package `megatron` that hides this one, or a part of this package that
Python finds in another folder. This module loads no torch, and runs on older Pythons.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec

PARTS = (
    *("checkpoint", "cli", "commands", "compat", "config", "context_parallel", "data", "data_parallel", "distributed"),
    *("engine", "errors", "evaluation", "expert_parallel", "inference", "interop", "layout", "model", "ops"),
    *("optimizer", "parallelize", "pipeline_parallel", "pipeline_schedules", "preprocess", "pretrain", "prove"),
    *("report", "state", "tensor_parallel", "tokenizer", "tokenizer_types", "torch_files", "training", "utils"),
    *("version",),
)
"""Names of our modules and packages. The folder that holds them may hold NVIDIA's, too."""
OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "megatron")


def refusal() -> str | None:
    """Returns why nothing can run here, or None."""
    if sys.version_info < (3, 11):  # noqa: UP036
        return (
            f"Python {sys.version.split()[0]} at {sys.executable}: not supported; use Python 3.11 to 3.13 "
            "(bash examples/quickstart.sh finds one and makes a .venv with it)"
        )
    found = find_spec("megatron")
    if found is not None and found.has_location:
        # A regular package (a folder with an __init__.py) hides every namespace package of its name, even from a later
        # folder of the path; Megatron-LM's is one in some versions.
        return (
            f"{found.origin}: another package megatron hides this one; take its folder from PYTHONPATH, or uninstall "
            "it from this Python"
        )
    return next(filter(None, map(found_elsewhere, PARTS)), None)


def found_elsewhere(part: str) -> str | None:
    """Returns the refusal of a part that Python would import from another folder. Nothing is imported."""
    found = find_spec(f"megatron.{part}")
    origin = OWN if found is None else found.origin or next(iter(found.submodule_search_locations or ()), OWN)
    folder = origin.removesuffix("__init__.py").rstrip(os.sep)
    if os.path.realpath(os.path.dirname(folder)) == os.path.realpath(OWN):
        return None
    other = os.path.dirname(os.path.dirname(folder))
    return (
        f"megatron.{part}: Python finds it in {folder}, and this program is in {OWN}; start in a folder other than "
        f"{other}, and take that from PYTHONPATH"
    )


if (reason := refusal()) is not None:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)


def run(command: str) -> int:
    """Runs the command of `megatron.cli` whose module is named, and returns its exit code."""
    from megatron.utils.command_line import run_tool_module

    return run_tool_module(f"megatron.cli.{command}")


def train() -> int:
    """Pretrains a GPT, as `pretrain_gpt.py` does; ends the process."""
    from megatron.cli.train import main

    return main()


# The installed commands that are tools/ in a checkout (pyproject.toml).
check_layout = partial(run, "check_layout")
convert_checkpoint = partial(run, "convert_checkpoint")
draw_pipeline = partial(run, "draw_pipeline")
env = partial(run, "env")
evaluate = partial(run, "evaluate")
generate = partial(run, "generate")
harness = partial(run, "harness")
inspect_dataset = partial(run, "inspect_dataset")
merge_datasets = partial(run, "merge_datasets")
plot_loss = partial(run, "plot_loss")
preprocess_data = partial(run, "preprocess_data")
profile_summary = partial(run, "profile_summary")
results_table = partial(run, "results_table")
train_tokenizer = partial(run, "train_tokenizer")
verify_checkpoint = partial(run, "verify_checkpoint")

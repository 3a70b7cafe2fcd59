"""Stubs under the names of Megatron-LM's tools: each prints the equivalent command of this project."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.utils.command_line import run_tool

_FLAGS = {
    "--load-dir": "--load",
    "--save-dir": "--save",
    "--target-tensor-parallel-size": "--target-tensor-parallel-size",
    "--target-pipeline-parallel-size": "--target-pipeline-parallel-size",
    "--true-vocab-size": "--true-vocab-size",
}
_FORMATS = {"megatron": "megatron", "core": "megatron", "mcore": "megatron", "legacy": "megatron"}


def converting(words: Sequence[str]) -> str:
    """Translates the command of Megatron-LM's converter: loader and saver become formats, other flags keep their
    meaning."""
    given = _values(words)
    saver = given.get("--saver", "megatron")
    target = "hf" if saver.endswith("_hf") else _FORMATS.get(saver, "megatron")
    names = ["--megatron-names", "core"] if saver in ("core", "mcore") else []
    kept = [part for flag, new in _FLAGS.items() if flag in given for part in (new, given[flag])]
    if "--load" not in kept:
        kept = ["--load", "DIR", *kept]
    if "--save" not in kept:
        kept = [*kept, "--save", "DIR"]
    if target == "hf":
        kept = [word for word in kept if not word.startswith("--target")]
    return shlex.join(["python", "tools/convert_checkpoint.py", "--to", target, *names, *kept])


def _generate(words: Sequence[str]) -> str:
    return "python tools/generate.py --load DIR --prompt TEXT (it loads the model itself and needs no server)"


_EVALUATED = ("--load", "--seq-length", "--tensor-model-parallel-size", "--pipeline-model-parallel-size")
_EVALUATED_FILES = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file")


def _evaluate(words: Sequence[str]) -> str:
    """Translates the two tasks for a GPT. The model's shape comes from its checkpoint."""
    given = _values(words)
    task = given.get("--task", "WIKITEXT103")
    if task not in ("WIKITEXT103", "LAMBADA"):
        raise ConfigError(
            f"--task {task}: not supported; use WIKITEXT103 or LAMBADA, or tools/evaluate.py --task choices for "
            "multiple choice"
        )
    what = ["--task", "lambada"] if task == "LAMBADA" else ["--detokenize", "wikitext"]
    if task == "LAMBADA":
        what += ["--strict-lambada"] if "--strict-lambada" in given else []
    else:
        what += ["--overlapping-eval", given.get("--overlapping-eval", "32")]
    data = given.get("--valid-data") or "FILE"
    kept = [part for flag in (*_EVALUATED, *_EVALUATED_FILES) if flag in given for part in (flag, given[flag])]
    if "--load" not in given:
        kept = ["--load", "DIR", *kept]
    return shlex.join(["python", "tools/evaluate.py", *what, "--data", data, *kept])


def _memory(words: Sequence[str]) -> str:
    return shlex.join(["python", "pretrain_gpt.py", *words, "--dry-run"])


_ANSWERS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "tools/checkpoint_util.py": converting,
    "tools/checkpoint/convert.py": converting,
    "tools/text_generation_cli.py": _generate,
    "tools/run_text_generation_server.py": _generate,
    "tools/report_theoretical_memory.py": _memory,
    "tasks/main.py": _evaluate,
}
RENAMED = tuple(_ANSWERS)


def _values(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for flag, value in zip(words, [*words[1:], ""], strict=False):
        name, equals, inline = flag.partition("=")
        if name.startswith("--"):
            found[name] = inline if equals else value
    return found


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Prints the equivalent command. Returns 0 for --help, else 2, the exit code of a usage error."""
    words = sys.argv[1:] if argv is None else argv

    def answer() -> None:
        if {"-h", "--help"} & set(words):
            print(f"usage: {_ANSWERS[name](())}\n\nThis command replaces {name}.")
            return
        raise ConfigError(f"{name}: this tool has another name here; run: {_ANSWERS[name](words)}")

    return run_tool("error", answer)


def script_name(path: str) -> str:
    """Path of a file relative to the root of the checkout."""
    return Path(path).resolve().relative_to(Path(__file__).resolve().parents[2]).as_posix()

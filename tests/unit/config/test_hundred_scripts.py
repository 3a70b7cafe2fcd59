"""Runs a hundred command lines of Megatron-LM's tests of 2026: most pass --dry-run; a list has what stops the others.

`tests/golden/scripts_2026.txt` lists by flag the numbers of the lines in which the flag has a value.
`tests/golden/scripts_2026_stopped.txt` lists the lines that do not pass, each with the flags that stop it.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron.errors import ConfigError
from megatron.training.dry_run import check_launch_files, render_plan
from megatron.training.initialize import start
from tests.helpers.other_programs import read_settings
from tests.helpers.runs import pretrain_gpt
from tests.unit.tokenizer.support import write_small_bpe

FOLDER = Path(__file__).parents[2] / "golden"


@cache
def scripts() -> dict[int, list[str]]:
    """Words of each line."""
    lines: dict[int, list[str]] = defaultdict(list)
    for row in (FOLDER / "scripts_2026.txt").read_text(encoding="utf-8").splitlines():
        places, _, flag = row.partition(" ")
        for place in places.split(","):
            first, _, last = place.partition("-")
            for number in range(int(first), int(last or first) + 1):
                lines[number] += shlex.split(flag)
    return lines


# Flags that change a result but are not supported, or that a run does not have: only these may stop a line.
NOT_BUILT = {
    *("--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim"),
    *("--v-head-dim", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--mtp-num-layers"),
    *("--fp8-format", "--fp8-recipe", "--fp8-param-gather", "--first-last-layers-bf16"),
    *("--moe-router-load-balancing-type", "--moe-router-topk", "--moe-shared-expert-gate", "--moe-layer-freq"),
    *("--expert-tensor-parallel-size", "--pipeline-model-parallel-layout", "--attention-output-gate"),
    *("--experimental-attention-variant", "--linear-attention-freq", "--linear-conv-kernel-dim"),
    *("--linear-key-head-dim", "--linear-num-key-heads", "--linear-num-value-heads", "--linear-value-head-dim"),
    *("--use-mup", "--mup-base-hidden-size", "--recompute-modules", "--fine-grained-activation-offloading"),
    *("--offload-modules", "--error-injection-rate", "--error-injection-type", "--num-layers"),
    *("--export-te-mcore-model", "--export-kd-teacher-load", "--export-kd-cfg"),  # distillation
    "--no-use-layer-wise-param-layout",
}

PLACES = {
    *("--data-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--tokenizer-model", "--data-cache-path"),
    *("--load", "--finetune", "--save", "--tensorboard-dir", "--wandb-save-dir"),
}
"""Flags that name, or need, files of the machine where the line was written."""


def without_places(words: list[str], tokenizer: list[str]) -> list[str]:
    kept, flag = [], ""
    for word in words:
        flag = word if word.startswith("--") else flag
        if flag not in PLACES:
            kept.append("1234" if (flag, word) == ("--seed", "x") else word)
    return [*kept, "--mock-data", *tokenizer]


def dry_run(words: list[str], *, plans: bool) -> tuple[str, ...]:
    """Flags that stop `words` with --dry-run on one process without a GPU; `plans` also writes the plan."""
    try:
        # Which library multiplies is measured otherwise, which takes longer than the rest.
        config = read_settings([*words, "--dry-run", "--cpu-threads", "1", "--fp32-products", "mkl"])
        run = start(config, stream=io.StringIO())
        check_launch_files(run, needs_data=True)
        if plans:
            render_plan(run, pretrain_gpt().model_provider)
    except ConfigError as refusal:
        return tuple(sorted({line.split()[0].rstrip(":") for line in refusal.lines}))
    return ()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, ...]]:
    """Lines that do not pass, with what stops each, on a machine without a GPU and with wandb."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab, merges = write_small_bpe(folder)
    ids = json.loads(vocab.read_text())
    for token in ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|endoftext|>"):
        ids.setdefault(token, len(ids))
    vocab.write_text(json.dumps(ids))
    text = ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr("megatron.distributed.device.accelerator_type", lambda: None)
        machine.setitem(sys.modules, "wandb", ModuleType("wandb"))
        found = {}
        for number, words in sorted(scripts().items()):
            tokenizer = text if "--fim-data" in words else ["--vocab-size", "50257"]
            found[number] = dry_run(without_places(words, tokenizer), plans=number % 10 == 0)
    torch.use_deterministic_algorithms(False)  # which some lines ask for
    return {number: flags for number, flags in found.items() if flags}


def test_the_lines_are_whole() -> None:
    assert sorted(scripts()) == list(range(100))
    assert sum(len(words) for words in scripts().values()) == 9798


def test_most_lines_pass_a_dry_run_without_a_gpu(stopped: dict[int, tuple[str, ...]]) -> None:
    assert 100 - len(stopped) >= 70


def test_the_others_are_listed_with_what_stops_them(stopped: dict[int, tuple[str, ...]]) -> None:
    listed = (FOLDER / "scripts_2026_stopped.txt").read_text(encoding="utf-8")
    assert "".join(f"{number} {' '.join(flags)}\n" for number, flags in stopped.items()) == listed


def test_only_what_is_not_built_stops_a_line(stopped: dict[int, tuple[str, ...]]) -> None:
    assert {flag for flags in stopped.values() for flag in flags} - NOT_BUILT == set()

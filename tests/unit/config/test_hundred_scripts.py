"""A hundred command lines of Megatron-LM's tests of 2026: most are taken, and what stops the others is known.

tests/golden/scripts_2026.txt holds them by flag: the numbers of the lines in which a flag stands with a value.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from functools import cache
from pathlib import Path

from megatron.config import parse_args
from megatron.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden" / "scripts_2026.txt"


@cache
def scripts() -> dict[int, list[str]]:
    """The words of each line."""
    lines: dict[int, list[str]] = defaultdict(list)
    for row in GOLDEN.read_text(encoding="utf-8").splitlines():
        places, _, flag = row.partition(" ")
        for place in places.split(","):
            first, _, last = place.partition("-")
            for number in range(int(first), int(last or first) + 1):
                lines[number] += shlex.split(flag)
    return lines


# What changes a result and is not built, or is no setting of a run: only these may stop a line.
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
    "--seed",  # of a line whose seed the collection has replaced by x
}


@cache
def refusals() -> dict[int, tuple[str, ...]]:
    """The lines that are refused, and the flags that stop them."""
    found = {}
    for number, words in scripts().items():
        try:
            parse_args(words)
        except ConfigError as refusal:
            found[number] = tuple(line.split()[0].rstrip(":") for line in refusal.lines)
    return found


def test_the_lines_are_whole() -> None:
    assert sorted(scripts()) == list(range(100))
    assert sum(len(words) for words in scripts().values()) == 9798


def test_most_lines_are_taken_as_written() -> None:
    assert 100 - len(refusals()) >= 68


def test_only_what_is_not_built_stops_a_line() -> None:
    stopping = {flag for flags in refusals().values() for flag in flags}
    assert stopping - NOT_BUILT == set()

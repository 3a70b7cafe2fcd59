"""Finds the fenced blocks of a Markdown file: tests execute `bash` blocks; `console` blocks are only shown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/first_run.md",
    "docs/installation.md",
    "docs/getting_started.md",
    "docs/from_megatron_lm.md",
    "docs/from_deepspeed.md",
    "docs/from_transformers.md",
    "docs/data.md",
    "docs/training.md",
    "docs/any_model.md",
    "docs/parallelism.md",
    "docs/launchers.md",
    "docs/configs.md",
    "docs/scale.md",
    "docs/proofs.md",
    "docs/checkpoints.md",
    "docs/megatron_checkpoints.md",
    "docs/huggingface.md",
    "docs/sft.md",
    "docs/evaluation.md",
    "docs/generation.md",
    "docs/model_families.md",
    "docs/glossary.md",
    "docs/numerics.md",
    "docs/performance.md",
    "benchmarks/RESULTS.md",
    "docs/kernels.md",
    "docs/troubleshooting.md",
    "docs/flags.md",
    "docs/flags_of_others.md",
    "docs/presets.md",
    "CONTRIBUTING.md",
    "docs/api.md",
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    found = []
    language, start, lines = None, 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.removeprefix("> ")  # a box
        fence = re.match(r"\s*```\s*(\S*)", line)
        if fence and language is None:
            language, start, lines = fence.group(1), number, []
        elif fence:
            found.append(Block(page, start, language or "", "\n".join(lines)))
            language = None
        elif language is not None:
            lines.append(line)
    if language is not None:
        raise ValueError(f"{page}:{start}: a fenced block that never ends")
    return found


def all_blocks() -> list[Block]:
    pages = [page for page in PAGES if (ROOT / page).is_file()]
    return [block for page in pages for block in blocks_of((ROOT / page).read_text(encoding="utf-8"), page)]

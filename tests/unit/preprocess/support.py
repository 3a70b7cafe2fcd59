"""Corpora, the tool as a command, and a writer of the format that shares no code with the package."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from tests.unit.tokenizer.support import NASTY, SAMPLES, write_small_bpe

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"


@dataclass(frozen=True)
class Workshop:
    """A folder with a tokenizer, in which the tool runs."""

    folder: Path

    @property
    def tokenizer(self) -> GPT2BPETokenizer:
        return GPT2BPETokenizer(self.folder / "vocab.json", self.folder / "merges.txt")

    def corpus(self, name: str, lines: Iterable[str | bytes | dict[str, Any]]) -> Path:
        path = self.folder / name
        with open(path, "wb") as stream:
            for line in lines:
                raw = json.dumps(line) if isinstance(line, dict) else line
                stream.write((raw if isinstance(raw, bytes) else raw.encode("utf-8")) + b"\n")
        return path

    def command(self, *flags: str, tokenizer: bool = True) -> list[str]:
        files = ["--vocab", "vocab.json", "--merge-file", "merges.txt"] if tokenizer else []
        return [sys.executable, str(TOOL), *files, *flags]

    def run(self, *flags: str, tokenizer: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        command = self.command(*flags, tokenizer=tokenizer)
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False)

    def output(self, prefix: str, key: str = "text") -> tuple[bytes, bytes]:
        stem = self.folder / f"{prefix}_{key}_document"
        return stem.with_name(stem.name + ".bin").read_bytes(), stem.with_name(stem.name + ".idx").read_bytes()

    def leftovers(self, prefix: str) -> list[str]:
        """All files with the output's name."""
        return sorted(path.name for path in self.folder.iterdir() if prefix in path.name)


def make_workshop(folder: Path) -> Workshop:
    write_small_bpe(folder)
    return Workshop(folder)


def sample_documents(count: int) -> list[dict[str, Any]]:
    """Documents of many lengths; some empty."""
    texts = [*SAMPLES, *NASTY]
    return [{"text": texts[i % len(texts)] * (i % 5), "id": i} for i in range(count)]


def expected_files(documents: Sequence[Sequence[Sequence[int]]], code: int = 8) -> tuple[bytes, bytes]:
    """.bin and .idx by the format's description; a document is a list of sequences of ids."""
    kind, width = {8: ("H", 2), 4: ("i", 4)}[code]
    sequences = [sequence for document in documents for sequence in document]
    tokens = b"".join(struct.pack(f"<{len(sequence)}{kind}", *sequence) for sequence in sequences)
    pointers, boundaries, end = [], [0], 0
    for sequence in sequences:
        pointers.append(end)
        end += len(sequence) * width
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(boundaries))
    index += struct.pack(f"<{len(sequences)}i", *(len(sequence) for sequence in sequences))
    index += struct.pack(f"<{len(pointers)}q", *pointers) + struct.pack(f"<{len(boundaries)}q", *boundaries)
    return tokens, index


def expected_documents(tokenizer: GPT2BPETokenizer, texts: Iterable[str], *, eod: bool) -> list[list[list[int]]]:
    """Megatron's rule: an empty document stays, with no sequence and no end-of-document token."""
    documents = []
    for text in texts:
        ids = tokenizer.tokenize(text)
        documents.append([[*ids, *([tokenizer.eod] if eod else [])]] if ids else [])
    return documents

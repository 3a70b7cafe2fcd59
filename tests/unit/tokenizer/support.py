"""A small vocabulary for the tests, with merges of words, spaces and several scripts."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.tokenizer.bpe_files import BPE
from megatron.tokenizer.export import bpe_file_texts, write_files
from megatron.tokenizer.train import train_bpe

SAMPLES = (
    "def hello_world():\n    print('hello, world')\n\n\nclass A:\n\tpass\n",
    "The quick brown fox didn't jump; they're sure we've seen it'll do. 3.14159 and 2024-01-01.",
    "Größe naïve façade über Straße — “quoted” … 東京は日本の首都です。 Привет, мир! שלום עולם",
    "for i in range(100):\n        total += values[i]  # sum    \n    return total\n",
    "🙂🙃👩‍👩‍👧‍👦 e\u0301 a\u0308 \u200d\u200b x\u00a0y",
)

# Texts that each once broke some tokenizer.
NASTY = (
    "",
    " ",
    "  \n\t ",
    "\n\n\n",
    "a  b",
    "a \n b",
    "don't we'LL they'Re",
    "x" * 300,
    " x" * 50,
    "<|endoftext|>",
    "before <|endoftext|> after<|endoftext|>",
    "\x00\x01\x1c\x1f\x7f\x85\xa0\u180e\u2028\u3000\ufeff",
    "e\u0301\u0301\u0301 \u0301",
    "👩\u200d👩\u200d👧\u200d👦🏽",
    "١٢٣ ⅷ ² ½ 12a3",
    "\U0010ffff\ue000\ufffe",
    "ﬁ ﷽ 𝔘𝔫𝔦",
    "\r\n\r\n x\r",
)


@cache
def small_bpe(vocab_size: int = 500) -> BPE:
    return train_bpe(list(SAMPLES) * 3, vocab_size)


def write_small_bpe(directory: Path) -> tuple[Path, Path]:
    """(vocab.json, merges.txt)"""
    write_files(directory, bpe_file_texts(small_bpe()))
    return directory / "vocab.json", directory / "merges.txt"


def train_pieces(path: Path, **options: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in SAMPLES for line in text.splitlines()] * 3),
        model_writer=model,
        **{"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2, **options},
    )
    path.write_bytes(model.getvalue())
    return path

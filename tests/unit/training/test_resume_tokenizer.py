"""A run continues with the tokenizer that it began with, even if its data has no record of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.tokenizer.export import bpe_file_texts, write_files
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.train import train_bpe
from tests.helpers.runs import flags, pretrain_here
from tests.unit.tokenizer.support import SAMPLES


def test_another_tokenizer_of_the_same_size_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, texts in (("one", SAMPLES), ("other", ("another text", *SAMPLES[2:]))):
        write_files(tmp_path / name, bpe_file_texts(train_bpe(list(texts), 270)))
    one = GPT2BPETokenizer(tmp_path / "one" / "vocab.json", tmp_path / "one" / "merges.txt")
    one.save_pretrained(tmp_path / "saved")  # the same tokenizer in another form
    with IndexedDatasetBuilder(tmp_path / "data", "uint16") as builder:
        for _ in range(20):
            builder.add_document(np.arange(100), [100])

    def run(iterations: int, **tokenizer: Any) -> int:
        words = {"mock_data": None, "vocab_size": None, "data_path": tmp_path / "data", "split": "100,0,0"}
        words |= {
            "save": tmp_path / "run",
            "load": tmp_path / "run",
            "train_iters": iterations,
            "eval_iters": 0,
            "lr_decay_iters": 2,
        }
        return pretrain_here(flags(**words, **tokenizer))

    def gpt2(name: str) -> dict[str, Path]:
        return {"vocab_file": tmp_path / name / "vocab.json", "merge_file": tmp_path / name / "merges.txt"}

    assert run(1, **gpt2("one")) == 0
    capsys.readouterr()
    assert run(2, **gpt2("other")) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "the tokenizer (GPT2BPETokenizer, fingerprint " in line and f"that of {tmp_path / 'run'}" in line
    assert run(2, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path / "saved") == 0

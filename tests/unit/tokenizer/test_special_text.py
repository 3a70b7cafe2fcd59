"""`tokenize_special`: text of a prompt that spells a special token becomes that token if the user asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.tik import TikTokenizer
from tests.helpers.chats import SPECIAL, write_chat_tokenizer
from tests.unit.tokenizer.support import NASTY, SAMPLES, write_small_bpe
from tests.unit.tokenizer.test_tik import write_json

transformers = pytest.importorskip("transformers")
TEXTS = (*NASTY, *SAMPLES, *("".join(f"{token} {SAMPLES[n]}{token}{token}" for n, token in enumerate(SPECIAL[:4])),))


def test_gpt2_and_hugging_face_are_those_of_transformers(tmp_path: Path) -> None:
    gpt2 = GPT2BPETokenizer(*write_small_bpe(tmp_path))
    gpt2.save_pretrained(tmp_path / "gpt2")
    write_chat_tokenizer(tmp_path / "chat")
    for folder in (tmp_path / "gpt2", tmp_path / "chat"):
        ours, theirs = HuggingFaceTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            expected = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.tokenize_special(text) == expected
            assert folder.name == "chat" or gpt2.tokenize_special(text) == expected
            assert ours.tokenize(text) == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_a_token_that_only_the_files_beside_name_is_one(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["added_tokens"] = described["added_tokens"][1:]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert HuggingFaceTokenizer(tmp_path).tokenize_special("<|endoftext|>x") == theirs("<|endoftext|>x")["input_ids"]


def test_tiktoken_is_tiktoken(tmp_path: Path) -> None:
    ours = TikTokenizer(write_json(tmp_path), num_special_tokens=20)
    for text in (*NASTY, "<s>a</s><SPECIAL_1><SPECIAL_10> <SPECIAL_19>", "</s>", "<s"):
        assert ours.tokenize_special(text) == ours._encoding.encode(text, allowed_special="all")


def test_the_others_reject_it() -> None:
    with pytest.raises(ConfigError, match="--prompt-with-special-tokens: NullTokenizer does not read special tokens"):
        NullTokenizer(9).tokenize_special("1 2")

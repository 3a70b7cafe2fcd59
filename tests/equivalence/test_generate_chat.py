"""`tools/generate.py --chat` and `--prompt-with-special-tokens` continue the same prompt ids as `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.chats import MARKED, chat, some_chats, write_chat_tokenizer, write_chats
from tests.helpers.runs import flags, generate_here, pretrain_here

transformers = pytest.importorskip("transformers")
LENGTH, NEW = 320, 12
WRITTEN = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "theirs"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=268, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_chat_tokenizer(folder, MARKED)
    return folder


@cache
def model_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def expected(folder: Path, ids: Sequence[int]) -> list[int]:
    made = model_of(folder).generate(
        torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=2
    )
    return [token for token in made[0, len(ids) :].tolist() if token != 2]


def answers(folder: Path, out: Path, *words: Any) -> list[dict[str, Any]]:
    named = folder / "generation_config.json"
    if (folder / "config.json").is_file():
        named.write_text(json.dumps({"eos_token_id": 2}))
    how = ("--greedy", "--max-new-tokens", NEW, "--dtype", "float32", "--output", out)
    assert generate_here("--load", folder, *how, *words) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_conversations_go_through_the_template(theirs: Path, tmp_path: Path) -> None:
    tokenizer, out = transformers.AutoTokenizer.from_pretrained(theirs), tmp_path / "out.jsonl"
    chats = [messages[:-1] for messages in some_chats(3)] + [[*chat("hello", "he"), {"role": "tool", "content": "3"}]]
    found = answers(theirs, out, "--chat", "--prompts", write_chats(tmp_path / "chats.jsonl", chats))
    for messages, one in zip(chats, found, strict=True):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert one["prompt"] == tokenizer.decode(ids) and one["tokens"] == expected(theirs, ids)
    (one,) = answers(theirs, out, "--chat", "--prompt", "hello")
    assert one["prompt"] == WRITTEN
    (spelled,) = answers(theirs, out, "--prompt-with-special-tokens", "--prompt", WRITTEN)
    assert spelled == one, "what the template writes, written by hand"


def test_special_tokens_in_a_prompt_are_a_choice(theirs: Path, tmp_path: Path) -> None:
    tokenizer, out = transformers.AutoTokenizer.from_pretrained(theirs), tmp_path / "out.jsonl"
    (special,) = answers(theirs, out, "--prompt-with-special-tokens", "--prompt", WRITTEN)
    ids = tokenizer(WRITTEN)["input_ids"]
    assert ids[0] == 1 and special["tokens"] == expected(theirs, ids)
    (plain,) = answers(theirs, out, "--prompt", WRITTEN)
    assert plain["tokens"] == expected(theirs, tokenizer(WRITTEN, split_special_tokens=True)["input_ids"])
    assert plain["prompt"] == special["prompt"] and plain["tokens"] != special["tokens"]


def test_a_run_is_prompted_in_the_format_that_it_was_trained_with(theirs: Path, tmp_path: Path) -> None:
    """Megatron-LM's prompt formats are a setting of the run, not a template beside the tokenizer."""
    words = {
        "sft": True, "mock_data": None, "vocab_size": None, "split": "100,0,0", "seq_length": LENGTH, "train_iters": 1,
        "data_path": write_chats(tmp_path / "chats.jsonl", some_chats(6)), "max_position_embeddings": LENGTH,
        "micro_batch_size": 1, "global_batch_size": 1, "load": theirs, "finetune": True, "save": tmp_path / "run",
        "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": theirs, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "sft_tokenizer_prompt_format": "nemotron-nano-v2", "eval_iters": 0,
        **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "make_vocab_size_divisible_by")),
    }  # fmt: skip
    assert pretrain_here(flags(**words)) == 0
    (one,) = answers(tmp_path / "run", tmp_path / "out.jsonl", "--chat", "--prompt", "hello /think")
    assert one["prompt"] == "<SPECIAL_11>User\nhello\n<SPECIAL_11>Assistant\n"

"""Writes the folder that `transformers` opens: tokenizer.json and the small files beside it.

This module does not use `transformers`, so an export needs no network and its bytes do not depend on a version.
"""

import json
from pathlib import Path
from typing import Any

from megatron.errors import StorageError
from megatron.tokenizer.base import END_OF_TEXT
from megatron.tokenizer.bpe_files import BPE
from megatron.utils.durable import write_atomically


def write_gpt2_folder(directory: Path, bpe: BPE, model_max_length: int | None) -> None:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json, vocab.json and merges.txt."""
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) if bpe.eod_id is not None else {}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # GPT2Tokenizer adds <|endoftext|> to a vocabulary without it
        "model_input_names": ["input_ids", "attention_mask"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    write_files(
        directory,
        {
            "tokenizer.json": _json(tokenizer_json(bpe)),
            "tokenizer_config.json": config_text(config, model_max_length),
            "special_tokens_map.json": _json(special),
            **bpe_file_texts(bpe),
        },
    )


def config_text(config: dict[str, Any], model_max_length: int | None) -> str:
    """Returns the text of tokenizer_config.json."""
    return _json(config if model_max_length is None else {**config, "model_max_length": model_max_length})


def bpe_file_texts(bpe: BPE) -> dict[str, str]:
    """Returns the texts of vocab.json and merges.txt in GPT-2's format."""
    vocab = dict(sorted(bpe.vocab.items(), key=lambda item: item[1]))
    merges = "".join(f"{left} {right}\n" for left, right in bpe.merges)
    return {"vocab.json": json.dumps(vocab, ensure_ascii=False), "merges.txt": "#version: 0.2\n" + merges}


def write_files(directory: Path, texts: dict[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(directory / name, [text.encode("utf-8")], sync=False)
    except OSError as error:
        raise StorageError(
            f"{directory}: the tokenizer's files could not be written ({error.strerror}); choose another folder"
        ) from None


def tokenizer_json(bpe: BPE) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [] if bpe.eod_id is None else [{"id": bpe.eod_id, "content": END_OF_TEXT, **added}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {**byte_level, "trim_offsets": False},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(bpe.vocab.items(), key=lambda item: item[1])),
            "merges": [list(merge) for merge in bpe.merges],
        },
    }


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"

"""Writes a tokenizer's files so that every version of `transformers` reads tokenizer.json unchanged.

`AutoTokenizer` chooses a class by tokenizer_config.json and by the model's type. Most classes rebuild the tokenizer
from its vocabulary, with their own pre-tokenization pattern, defaults and special tokens. `PreTrainedTokenizerFast`
does not.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import StorageError
from megatron.tokenizer.export import config_text
from megatron.tokenizer.fast.kinds import QWEN2_SPLIT
from megatron.tokenizer.huggingface import ROLES, HuggingFaceTokenizer, named_tokens, read_json

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
_REPLACED = (CONFIG, SPECIAL_TOKENS, "added_tokens.json")
"""Files that an export replaces or leaves out, because they could contradict tokenizer.json."""
_WITH_DEFAULTS = ROLES[:5]
"""Roles that are written as null if they have no token. A class of `transformers` may otherwise add a default token."""


def _is_length(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 < value < math.inf)


def _is_side(value: Any) -> bool:
    return value in ("left", "right")


def _is_template(value: Any) -> bool:
    """True for one template, or for several by name."""
    if isinstance(value, list):
        texts = [each.get(key) if isinstance(each, dict) else None for each in value for key in ("name", "template")]
    else:
        texts = [*value.values()] if isinstance(value, dict) else ["" if value is None else value]
    return all(isinstance(text, str) for text in texts)


# Values of a tokenizer's configuration that an export copies, if `transformers` can read them.
_KEPT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model_max_length": (_is_length, "a positive number"),
    "padding_side": (_is_side, "left or right"),
    "truncation_side": (_is_side, "left or right"),
    "chat_template": (_is_template, 'text, or a list of {"name": ..., "template": ...}'),
}


def is_qwen2(description: Mapping[str, Any]) -> bool:
    """True if a tokenizer.json equals what Qwen2Tokenizer rebuilds from its vocabulary and merges."""
    model, words = description.get("model") or {}, (description.get("pre_tokenizer") or {}).get("pretokenizers") or ()
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    split = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    characters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return (
        model.get("type") == "BPE"
        and not any(model.get(option) for option in (*options, "ignore_merges"))
        and (description.get("normalizer") or {}).get("type") == "NFC"
        and (description.get("decoder") or {}).get("type") == "ByteLevel"
        and [{**word, "trim_offsets": None} for word in words]
        == [{**word, "trim_offsets": None} for word in (split, characters)]
    )


@dataclass(frozen=True)
class TokenizerFiles:
    """Folder with a tokenizer, and the names of its relevant files."""

    folder: Path
    names: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> "TokenizerFiles":
        return cls(folder, frozenset(path.name for path in folder.iterdir() if path.is_file()))

    @property
    def has_json(self) -> bool:
        return JSON in self.names

    def tokenizer(self) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer(self.folder, only=self.names, announce=False)

    def json(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name) if name in self.names else {}

    def roles(self, rows: int) -> dict[str, str]:
        """Returns role -> special token that the files name and whose id is a row of the model's token embedding."""
        tokenizer, named = self.tokenizer(), named_tokens(self.folder / JSON, self.names)
        if tokenizer.eod_token is not None:
            named["eos_token"] = tokenizer.eod_token
        ids = {role: tokenizer.token_id(token) for role, token in named.items()}
        return {role: token for role, token in named.items() if (index := ids[role]) is not None and index < rows}

    def left_out(self) -> list[str]:
        """Returns a log line for each value of tokenizer_config.json that an export leaves out."""
        given = self.json(CONFIG) if self.has_json else {}
        return [
            f"{self.folder / CONFIG}: {name} is {given[name]!r:.60}, but transformers requires {what}; the "
            f"exported {CONFIG} does not contain it, so set it there if you need it"
            for name, (is_one, what) in _KEPT.items()
            if name in given and not is_one(given[name])
        ]

    def portable(self, rows: int) -> dict[str, bytes]:
        """Returns file name -> content of an exported tokenizer. Without a tokenizer.json the files are copied.
        Otherwise the new tokenizer_config.json neither adds nor changes a token. `rows`: of the token embedding."""
        files = {name: _read(self.folder / name) for name in sorted(self.names)}
        if not self.has_json:
            return files
        description = self.json(JSON)
        if description.get("padding") is not None or description.get("truncation") is not None:
            # A stored limit would truncate texts, and a stored padding may name a token that the model lacks.
            plain = {**description, "padding": None, "truncation": None}
            files[JSON] = (json.dumps(plain, ensure_ascii=False, indent=2) + "\n").encode("utf-8")
        config = _config(self.json(CONFIG), description, self.roles(rows))
        kept = {name: content for name, content in files.items() if name not in _REPLACED}
        return {**kept, CONFIG: config_text(config, None).encode("utf-8")}


def _config(given: Mapping[str, Any], description: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    words, added = description.get("pre_tokenizer") or {}, {}
    for token in description.get("added_tokens") or ():
        values = {name: value for name, value in token.items() if name != "id"}
        added[str(token["id"])] = {**values, "special": values.get("special") or values["content"] in roles.values()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],  # with token_type_ids, GPT-2 would add embeddings
        "clean_up_tokenization_spaces": False,
        # transformers 4 writes this value into the pre-tokenizer.
        **({"add_prefix_space": words["add_prefix_space"]} if "add_prefix_space" in words else {}),
        **{name: given[name] for name, (is_one, _) in _KEPT.items() if name in given and is_one(given[name])},
        **{role: roles.get(role) for role in ROLES if role in roles or role in _WITH_DEFAULTS},
        "added_tokens_decoder": added,
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from None

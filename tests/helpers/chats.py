"""A small tokenizer with chat templates, and conversations, for the tests of --sft."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.tokenizer.chat.encoder import ChatEncoder
from megatron.tokenizer.chat.template import ChatError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{%- for message in messages -%}\n{{- '<|im_start|>' + message.role + '\n' -}}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}\n"
    "{%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}{{- '\n' -}}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
FORGETS = (  # what is said first depends on how much follows, as in some reasoning models
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_chat_tokenizer(folder: Path, template: str | None = CHATML) -> int:
    """Bytes, a few merges and special tokens. Returns the number of its entries."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ċ", "Ċ"), ("Ġ", "t"), ("o", "u")]
    entries = [*SPECIAL, *byte_alphabet(), *("".join(pair) for pair in merges)]
    added = [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, token in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(entries)}, "merges": merges},
        "normalizer": None, "post_processor": {**byte_level, "trim_offsets": False}, "truncation": None,
        "padding": None,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "bos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return len(entries)


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Alternates turns; the user begins, the assistant answers."""
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return said if system is None else [{"role": "system", "content": system}, *said]


def some_chats(count: int) -> list[list[dict[str, str]]]:
    """Conversations of different lengths, some with several answers and a system message."""
    words = ("hello", " the hill", "you\n\nou", "étoile 🙂", "x")
    chats = []
    for i in range(count):
        turns = [words[(i + turn) % len(words)] * (1 + (i * 7 + turn) % 4) for turn in range(2 + 2 * (i % 2))]
        chats.append(chat(*turns, system="be brief" if i % 3 == 0 else None))
    return chats


def write_chats(path: Path, chats: Iterable[Sequence[Any]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return path


def encoded(made: ChatEncoder, messages: Sequence[Any], tools: Any = None) -> list[tuple[Any, Any]]:
    """Ids and counted places of one conversation; raises the reason if it cannot be encoded."""
    (found,) = made.encode_all([(messages, tools)])
    if isinstance(found, ChatError):
        raise found
    return found

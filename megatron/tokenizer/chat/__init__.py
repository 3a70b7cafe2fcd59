"""Conversations to ids with a tokenizer's chat template, and which of the ids are the assistant's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.tokenizer.build import HUGGING_FACE

if TYPE_CHECKING:
    from megatron.config import TokenizerConfig
    from megatron.tokenizer.chat.encoder import ChatEncoder


def build_chat_encoder(config: TokenizerConfig, eod_id: int | None) -> ChatEncoder:
    """The encoder for --sft. The format is Megatron-LM's where its type of tokenizer is named, else the tokenizer's own
    template."""
    if config.kind not in HUGGING_FACE or config.tokenizer_model is None:
        raise ConfigError(
            f"--sft: {config.kind} has no chat template; give --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
            "FOLDER, or --load a Hugging Face model that has one"
        )
    try:
        from megatron.tokenizer.chat.encoder import ChatEncoder
    except ImportError as error:  # torch brings it along, but some builds of torch leave it out
        raise ConfigError(f"--sft: needs the package jinja2: pip install jinja2 ({error})") from None
    return ChatEncoder(config.tokenizer_model, config.prompt_format, eod_id)

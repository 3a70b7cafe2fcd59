"""Encodes conversations with a tokenizer's chat template, and marks the ids of the assistant's answers."""

from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.tokenizer.chat.encoder import ChatEncoder
from megatron.tokenizer_types import HUGGING_FACE, TOKENIZERS

if TYPE_CHECKING:
    from megatron.config import TokenizerConfig


def build_chat_encoder(config: "TokenizerConfig", eod_id: int | None, *, flag: str = "--sft") -> ChatEncoder:
    """Returns the chat encoder for `flag`. The settings name its prompt format. The default is the tokenizer's own
    template, or Megatron-LM's format for --tokenizer-type SFTTokenizer."""
    if TOKENIZERS[config.kind] is not HUGGING_FACE or config.tokenizer_model is None:
        raise ConfigError(
            f"{flag}: {config.kind} has no chat template; give --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
            "FOLDER, or --load a Hugging Face model with a chat template"
        )
    return ChatEncoder(config.tokenizer_model, config.prompt_format, eod_id)

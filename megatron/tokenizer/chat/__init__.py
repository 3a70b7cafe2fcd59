"""Encodes conversations with a tokenizer's chat template, and marks the ids of the assistant's answers."""

from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.tokenizer.chat.encoder import ChatEncoder
from megatron.tokenizer_types import HUGGING_FACE, TOKENIZERS

if TYPE_CHECKING:
    from megatron.config import TokenizerConfig


def build_chat_encoder(config: "TokenizerConfig", eod_id: int | None, *, flag: str = "--sft") -> ChatEncoder:
    """Returns the encoder that `flag` needs. Its format is the one that the settings name, by default the tokenizer's
    own template, and Megatron-LM's for --tokenizer-type SFTTokenizer."""
    if TOKENIZERS[config.kind] is not HUGGING_FACE or config.tokenizer_model is None:
        raise ConfigError(
            f"{flag}: {config.kind} has no chat template; give --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
            "FOLDER, or --load a Hugging Face model that has one"
        )
    return ChatEncoder(config.tokenizer_model, config.prompt_format, eod_id)

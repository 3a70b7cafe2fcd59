"""The tokenizer that a checkpoint was trained with, read from the checkpoint."""

from __future__ import annotations

from megatron.checkpoint.load import FoundStep
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer


def saved_tokenizer(found: FoundStep) -> Tokenizer | None:
    """None if the run saved no tokenizer, because its data came as token ids."""
    folder = found.tokenizer
    if folder is not None and (folder / "tokenizer.json").is_file():
        settings = TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
        return build_tokenizer(settings, announce=False)
    saved = dict(found.manifest.config.get("tokenizer") or {})
    if saved.get("tokenizer_type") == "NullTokenizer" and saved.get("vocab_size"):
        return build_tokenizer(
            TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=saved["vocab_size"]), announce=False
        )
    return None

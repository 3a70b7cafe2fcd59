"""Builds the tokenizer that the settings name. `megatron.tokenizer_types` lists the types."""

import difflib
from importlib import import_module

from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer, TokenizerOptions, TokenizerSettings
from megatron.tokenizer_types import GPT2, OF_OTHER_MODELS, TOKENIZERS, flag_of


def build_tokenizer(config: TokenizerOptions, *, announce: bool = True) -> Tokenizer:
    """Builds and checks the tokenizer. `announce=False` omits the warning about a slow engine."""
    kind = _kind(config)
    made = TOKENIZERS[kind]
    for name in made.unused:
        if (value := getattr(config, name)) is not None:
            raise ConfigError(
                f"{flag_of(name)} {value}: {kind} does not use it; remove the flag, or choose another --tokenizer-type"
            )
    encoder = config.encoder if isinstance(config, TokenizerSettings) else "exact"
    if encoder == "fast" and not made.fast:
        raise ConfigError(f"--encoder fast: {kind} has no fast encoder; give --encoder auto or exact")
    if (missing := made.missing(kind, config)) is not None:
        raise ConfigError(missing)
    module, name = made.made_by.split(".")
    maker: type[Tokenizer] = getattr(import_module(f"megatron.tokenizer.{module}"), name)
    tokenizer = maker.from_settings(config, encoder=encoder, announce=announce)
    _check_special_tokens(config, kind, tokenizer)
    if not made.sized_by_settings and config.vocab_size is not None and config.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {config.vocab_size}: the {kind} has {tokenizer.vocab_size} tokens; remove --vocab-size"
        )
    return tokenizer


def _kind(config: TokenizerOptions) -> str:
    kind = config.tokenizer_type
    if kind is None:
        if config.vocab_file and config.merge_file:
            return GPT2
        raise ConfigError(
            "--tokenizer-type: not given; give --vocab-file and --merge-file (GPT2BPETokenizer), or "
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"
        )
    working = ", ".join(TOKENIZERS)
    if kind in OF_OTHER_MODELS:
        raise ConfigError(f"--tokenizer-type {kind}: not supported (not for GPT pretraining); use one of {working}")
    if kind not in TOKENIZERS:
        near = difflib.get_close_matches(kind, TOKENIZERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"use one of {working}"
        raise ConfigError(f"--tokenizer-type {kind}: no such tokenizer; {hint}")
    return kind


def _check_special_tokens(config: TokenizerOptions, kind: str, tokenizer: Tokenizer) -> None:
    """Rejects special tokens that the vocabulary lacks. Megatron-LM gives them new ids, which neither the tokenizer's
    files nor an export would contain."""
    absent = [token for token in config.tiktoken_special_tokens or () if tokenizer.token_id(token) is None]
    if absent:
        raise ConfigError(
            f"--tokenizer-special-tokens {' '.join(absent)}: not in the vocabulary of this {kind}; add them to the "
            "tokenizer's files, so that exports contain them, or remove the flag"
        )

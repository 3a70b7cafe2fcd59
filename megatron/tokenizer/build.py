"""Builds the tokenizer that the settings name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fast.guard import Encoder

if TYPE_CHECKING:
    from megatron.config import TokenizerConfig

GPT2 = "GPT2BPETokenizer"
HUGGING_FACE = ("HuggingFaceTokenizer", "HFTokenizer", "SFTTokenizer")
NULL = "NullTokenizer"
SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TIK = "TikTokenizer"
BERT = ("BertWordPieceLowerCase", "BertWordPieceCase")
NOT_FOR_GPT = ("MultimodalTokenizer", "NullMultimodalTokenizer")
WORKING = (GPT2, HUGGING_FACE[0], *SENTENCE_PIECE, TIK, *BERT, NULL)


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The settings as a plain value, for tools and worker processes."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: tuple[str, ...] | None = None
    null_tokenizer_eod_id: int | None = None
    encoder: Encoder = "auto"  # auto: the fast encoder where it is exact; fast: an error where it is not; exact


TokenizerOptions = Union["TokenizerConfig", TokenizerSettings]  # the section of a training run, or these


def build_tokenizer(config: TokenizerOptions, *, announce: bool = True) -> Tokenizer:
    """Builds and checks the tokenizer. `announce=False` omits the warning about a slow engine."""
    kind = _kind(config)
    if kind != NULL:
        _refuse_unused(config, kind, "null_tokenizer_eod_id")
    encoder = config.encoder if isinstance(config, TokenizerSettings) else "exact"
    if encoder == "fast" and kind not in (GPT2, *HUGGING_FACE):
        raise ConfigError(f"--encoder fast: {kind} has no fast encoder; give --encoder auto or exact")
    if kind == NULL:
        tokenizer = _build_null(config)
    elif kind == GPT2:
        tokenizer = _build_gpt2(config, encoder, announce)
    elif kind in HUGGING_FACE:
        tokenizer = _build_hugging_face(config, kind, encoder, announce)
    elif kind in BERT:
        tokenizer = _build_bert(config, kind)
    elif kind == TIK:
        tokenizer = _build_tik(config)
    else:
        tokenizer = _build_sentence_piece(config, kind)
    if kind != TIK:
        _check_special_tokens(config, kind, tokenizer)
    if kind != NULL and config.vocab_size is not None and config.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {config.vocab_size}: the {kind} has {tokenizer.vocab_size} tokens; leave --vocab-size out"
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
    working = ", ".join(WORKING)
    if kind in NOT_FOR_GPT:
        raise ConfigError(f"--tokenizer-type {kind}: not supported (not for GPT pretraining); use one of {working}")
    if kind not in (*WORKING, *HUGGING_FACE):
        near = difflib.get_close_matches(kind, WORKING, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"use one of {working}"
        raise ConfigError(f"--tokenizer-type {kind}: no such tokenizer; {hint}")
    return kind


def _build_gpt2(config: TokenizerOptions, encoder: Encoder, announce: bool) -> Tokenizer:
    from megatron.tokenizer.gpt2 import GPT2BPETokenizer

    _refuse_unused(config, GPT2, "tokenizer_model")
    if not config.vocab_file or not config.merge_file:
        missing = "--vocab-file" if not config.vocab_file else "--merge-file"
        raise ConfigError(
            f"{missing}: not given; {GPT2} needs --vocab-file vocab.json and --merge-file merges.txt "
            "(tools/train_tokenizer.py makes both)"
        )
    return GPT2BPETokenizer(config.vocab_file, config.merge_file, encoder=encoder, announce=announce)


def _build_hugging_face(config: TokenizerOptions, kind: str, encoder: Encoder, announce: bool) -> Tokenizer:
    from megatron.tokenizer.huggingface import HuggingFaceTokenizer

    model = _model_of(config, kind, "a folder with a tokenizer.json")
    return HuggingFaceTokenizer(model, encoder=encoder, announce=announce)


def _build_tik(config: TokenizerOptions) -> Tokenizer:
    from megatron.tokenizer.tik import TikTokenizer

    return TikTokenizer(
        _model_of(config, TIK, "a JSON list of ranks or a .tiktoken file"),
        pattern=config.tiktoken_pattern,
        vocab_size=config.vocab_size,
        num_special_tokens=config.tiktoken_num_special_tokens,
        special_tokens=config.tiktoken_special_tokens,
    )


def _build_sentence_piece(config: TokenizerOptions, kind: str) -> Tokenizer:
    from megatron.tokenizer import sentence_piece as made

    classes = (made.SentencePieceTokenizer, made.GPTSentencePieceTokenizer, made.Llama2Tokenizer)
    model = _model_of(config, kind, "the tokenizer's .model file")
    return next(one for one in classes if one.name == kind)(model)


def _build_bert(config: TokenizerOptions, kind: str) -> Tokenizer:
    from megatron.tokenizer.bert import BertWordPieceTokenizer

    _refuse_unused(config, kind, "tokenizer_model", "merge_file")
    if not config.vocab_file:
        raise ConfigError(f"--vocab-file: not given; {kind} needs BERT's vocab.txt")
    return BertWordPieceTokenizer(config.vocab_file, lower_case=kind == BERT[0])


def _build_null(config: TokenizerOptions) -> Tokenizer:
    from megatron.tokenizer.null import NullTokenizer

    _refuse_unused(config, NULL, "tokenizer_model", "vocab_file", "merge_file")
    if config.vocab_size is None:
        raise ConfigError(f"--vocab-size: not given; {NULL} needs it")
    return NullTokenizer(config.vocab_size, eod_id=config.null_tokenizer_eod_id)


def _model_of(config: TokenizerOptions, kind: str, what: str) -> str:
    _refuse_unused(config, kind, "vocab_file", "merge_file")
    if not config.tokenizer_model:
        raise ConfigError(f"--tokenizer-model: not given; {kind} needs {what}")
    return config.tokenizer_model


def _check_special_tokens(config: TokenizerOptions, kind: str, tokenizer: Tokenizer) -> None:
    """Megatron-LM leaves those as they are that the tokenizer has, and gives the others new ids, which neither the
    tokenizer's files nor an export would know."""
    absent = [token for token in config.tiktoken_special_tokens or () if tokenizer.token_id(token) is None]
    if absent:
        raise ConfigError(
            f"--tokenizer-special-tokens {' '.join(absent)}: not in the vocabulary of this {kind}; add them to its "
            "files if it has any, where an export finds them too, or leave them out"
        )


def _refuse_unused(config: TokenizerOptions, kind: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value}: {kind} does not use it; leave it out or choose another --tokenizer-type"
            )

"""Table of tokenizer types: names that --tokenizer-type accepts, each with its class and the settings it reads."""

from collections.abc import Mapping
from dataclasses import dataclass

_OF_ONE_TYPE = ("null_tokenizer_eod_id", "tokenizer_model", "vocab_file", "merge_file")
"""Settings that are an error with a tokenizer type that does not read them."""


@dataclass(frozen=True, kw_only=True)
class TokenizerType:
    made_by: str
    """Module and class, in `megatron.tokenizer`."""
    needs: tuple[str, ...]
    """Required settings."""
    what: str
    """Description of the required settings, for messages."""
    takes: tuple[str, ...] = ()
    """Optional settings."""
    fast: bool = False
    """True if there is a fast encoder."""
    pretrains: bool = True
    """True if GPT pretraining supports it; other types are only for preprocessing."""

    def reads(self, name: str) -> bool:
        return name in (*self.needs, *self.takes)

    @property
    def sized_by_settings(self) -> bool:
        """True if --vocab-size sets the vocabulary, instead of being compared with it."""
        return self.reads("vocab_size")

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(name for name in _OF_ONE_TYPE if not self.reads(name))

    def missing(self, kind: str, settings: object) -> str | None:
        """Error text if `settings` lack what this type, named `kind`, needs; else None."""
        absent = [name for name in self.needs if getattr(settings, name) in (None, "")]
        if not absent:
            return None
        return f"{' and '.join(map(flag_of, absent))}: not given; --tokenizer-type {kind} needs {self.what}"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


HUGGING_FACE = TokenizerType(
    made_by="huggingface.HuggingFaceTokenizer",
    needs=("tokenizer_model",),
    what="a folder with a tokenizer.json",
    fast=True,
)


def _sentence_piece(name: str) -> TokenizerType:
    made_by, what = f"sentence_piece.{name}", "the tokenizer's .model file"
    return TokenizerType(made_by=made_by, needs=("tokenizer_model",), what=what)


_BERT = TokenizerType(
    made_by="bert.BertWordPieceTokenizer", needs=("vocab_file",), what="BERT's vocab.txt", pretrains=False
)
GPT2 = "GPT2BPETokenizer"
TOKENIZERS: Mapping[str, TokenizerType] = {
    GPT2: TokenizerType(
        made_by="gpt2.GPT2BPETokenizer",
        needs=("vocab_file", "merge_file"),
        what="vocab.json and merges.txt (tools/train_tokenizer.py makes both)",
        fast=True,
    ),
    "HuggingFaceTokenizer": HUGGING_FACE,
    "HFTokenizer": HUGGING_FACE,
    "SentencePieceTokenizer": _sentence_piece("SentencePieceTokenizer"),
    "GPTSentencePieceTokenizer": _sentence_piece("GPTSentencePieceTokenizer"),
    "Llama2Tokenizer": _sentence_piece("Llama2Tokenizer"),
    "TikTokenizer": TokenizerType(
        made_by="tik.TikTokenizer",
        needs=("tokenizer_model",),
        what="a JSON list of ranks or a .tiktoken file",
        takes=("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens"),
    ),
    "NullTokenizer": TokenizerType(
        made_by="null.NullTokenizer",
        needs=("vocab_size",),
        what="the number of its ids",
        takes=("null_tokenizer_eod_id",),
    ),
    "SFTTokenizer": HUGGING_FACE,
    "BertWordPieceLowerCase": _BERT,
    "BertWordPieceCase": _BERT,
}
OF_OTHER_MODELS = ("MultimodalTokenizer", "NullMultimodalTokenizer")
"""Megatron-LM's other types."""

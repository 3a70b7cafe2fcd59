"""Which tokens are trained on, and how text becomes tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.flag import flag
from megatron.errors import ConfigError

TOKENIZER_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "HFTokenizer", "NullTokenizer")
_LATER = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
_NOT_GPT = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
)
_REFUSED = {
    **dict.fromkeys(_LATER, "not supported yet; use HuggingFaceTokenizer with the model's tokenizer.json"),
    **dict.fromkeys(_NOT_GPT, "not a tokenizer for GPT pretraining; use GPT2BPETokenizer or HuggingFaceTokenizer"),
}


def parse_split(text: str) -> tuple[float, float, float]:
    """ "949,50,1" -> shares of training, validation and test that sum to 1; missing ones are 0, as in Megatron."""
    way_out = "give up to three non-negative numbers, as in --split 969,30,1"
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        raise ConfigError(f"--split {text}: not a list of numbers; {way_out}") from None
    total = math.fsum(parts)
    if len(parts) > 3 or min(parts) < 0 or not 0 < total < math.inf:
        raise ConfigError(f"--split {text}: cannot be a split; {way_out}")
    train, valid, test = (part / total for part in [*parts, 0.0, 0.0][:3])
    return train, valid, test


def parse_blend(paths: tuple[str, ...], spelling: str = "--data-path") -> tuple[tuple[float | None, str], ...]:
    """WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone (weight None) -> ((weight, prefix), ...)."""
    given = f"{spelling} {' '.join(paths)}"
    way_out = f"give one PREFIX, or WEIGHT PREFIX pairs as in {spelling} 0.3 web 0.7 code"
    numbers = [_number(path) for path in paths]
    if all(number is None for number in numbers):
        return tuple((None, path) for path in paths)
    if len(paths) % 2:
        raise ConfigError(f"{given}: {len(paths)} values are not pairs of a weight and a prefix; {way_out}")
    blend = []
    for weight, prefix in zip(numbers[::2], paths[1::2]):
        if weight is None:
            raise ConfigError(f"{given}: the weight before '{prefix}' is not a number; {way_out}")
        if not 0 < weight < math.inf:
            raise ConfigError(f"{given}: the weight {weight:g} is not a positive number; {way_out}")
        blend.append((weight, prefix))
    return tuple(blend)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    data_path: tuple[str, ...] | None = flag(
        None, "PREFIX of .bin/.idx files, or WEIGHT PREFIX WEIGHT PREFIX ...", nargs="+"
    )
    train_data_path: tuple[str, ...] | None = flag(None, "As --data-path, for training only.", nargs="+")
    valid_data_path: tuple[str, ...] | None = flag(None, "As --data-path, for validation only.", nargs="+")
    test_data_path: tuple[str, ...] | None = flag(None, "As --data-path, for the test only.", nargs="+")
    split: str = flag("969, 30, 1", "Proportions of documents for training, validation and test.")
    split_rule: str = flag("23.06", "Whose rounding cuts the documents.", choices=("23.06", "main"))
    data_cache_path: str | None = flag(None, "Directory of the index caches. Unset: beside the data.")
    seq_length: int = flag(0, "Tokens per sample.", at_least=1, required=True, aliases=("--encoder-seq-length",))
    num_workers: int = flag(2, "Processes that load data; 0 loads in the training process.", at_least=0)
    dataloader_type: str = flag(
        "single",
        "single: Megatron's own order; cyclic: reshuffled every epoch by the sampler.",
        choices=("single", "cyclic"),
        refused={"external": "a loader of your own is handed to megatron.pretrain(), not named here; use single"},
    )
    reset_position_ids: bool = flag(False, "Positions start again after each end of document.")
    reset_attention_mask: bool = flag(False, "No attention across documents.")
    eod_mask_loss: bool = flag(False, "No loss on the prediction that follows an end of document.")
    mmap_bin_files: bool = flag(True, "Read .bin files instead of mapping them.", off="--no-mmap-bin-files")
    mock_data: bool = flag(False, "Synthetic tokens instead of data files.")
    dataloader_inter_document_masking: bool = flag(
        False, "Packed sequences.", status="later", note="use --reset-attention-mask"
    )
    fim_data: bool = flag(False, "Fill-in-the-middle samples.", status="later", note="remove it")
    fim_rate: float = flag(0.5, "Share of fill-in-the-middle samples.", status="later", note="leave it out")
    object_storage_cache_path: str | None = flag(
        None, "Cache of indices from object storage.", status="later", note="copy the data to a local disk"
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    tokenizer_type: str | None = flag(
        None,
        "Kind of tokenizer; pretrain_gpt.py takes GPT2BPETokenizer when none is given.",
        choices=TOKENIZER_TYPES,
        refused=_REFUSED,
    )
    tokenizer_model: str | None = flag(None, "File or directory of a Hugging Face or SentencePiece tokenizer.")
    vocab_file: str | None = flag(None, "vocab.json of a GPT-2 byte-level BPE.", aliases=("--vocab",))
    merge_file: str | None = flag(None, "merges.txt of a GPT-2 byte-level BPE.", aliases=("--merges-file",))
    vocab_size: int | None = flag(
        None, "Vocabulary of NullTokenizer and --mock-data; must equal the tokenizer's own otherwise.", at_least=1
    )

    @property
    def kind(self) -> str:
        """The tokenizer type in force: GPT pretraining takes GPT2BPETokenizer when none is named, as Megatron does."""
        return self.tokenizer_type or "GPT2BPETokenizer"

"""Which tokens are trained on, and how text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
)


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
    seq_length: int = flag(0, "Tokens per sample.", at_least=1, required=True)
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
        refused=dict.fromkeys(
            ("BertWordPieceLowerCase", "BertWordPieceCase", "MultimodalTokenizer", "SFTTokenizer"),
            "not a tokenizer for GPT pretraining; use GPT2BPETokenizer or HuggingFaceTokenizer",
        ),
    )
    tokenizer_model: str | None = flag(None, "File or directory of a Hugging Face or SentencePiece tokenizer.")
    vocab_file: str | None = flag(None, "vocab.json of a GPT-2 byte-level BPE.", aliases=("--vocab",))
    merge_file: str | None = flag(None, "merges.txt of a GPT-2 byte-level BPE.", aliases=("--merges-file",))
    vocab_size: int | None = flag(
        None, "Vocabulary of NullTokenizer and --mock-data; must equal the tokenizer's own otherwise.", at_least=1
    )

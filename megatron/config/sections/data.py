"""The training data and the tokenizer."""

from dataclasses import dataclass

from megatron.config.flag import Need, excludes, flag
from megatron.config.sections.checkpoint import RESUME
from megatron.config.split import parse_split
from megatron.tokenizer_types import GPT2, OF_OTHER_MODELS, TOKENIZERS
from megatron.utils.numerals import INT32, MOST_PROCESSES

PROMPT_FORMATS = ("default", "identity", "nemotron-h-aligned", "nemotron-nano-v2")
_NOT_GPT = (*(name for name, made in TOKENIZERS.items() if not made.pretrains), *OF_OTHER_MODELS)
_REFUSED = dict.fromkeys(_NOT_GPT, "not a tokenizer for GPT pretraining; use GPT2BPETokenizer or HuggingFaceTokenizer")


_SETS = Need("--multiple-validation-sets", lambda run: run.data.multiple_validation_sets)
_FIM = Need("--fim-data", lambda run: run.data.fim_data)
_CYCLIC = Need("--dataloader-type cyclic", lambda run: run.data.dataloader_type == "cyclic")
_FILES = Need("data files", lambda run: not run.data.mock_data)
_PAIRS = Need(".bin/.idx files", lambda run: not run.data.mock_data and not run.data.sft)
_SFT = Need("--sft", lambda run: run.data.sft)
_FILES_OR_NONE = Need(
    "data files or a share of 0", lambda run: not run.data.mock_data or not all(parse_split(run.data.split))
)
_POSITIONS = Need("position embeddings", lambda run: run.model.positions != "none")
_MODEL_FILE = Need(
    "a --tokenizer-type that reads it", lambda run: TOKENIZERS[run.tokenizer.kind].reads("tokenizer_model")
)


_SEPARATE = ("per_split_data_args_path", "train_data_path", "valid_data_path", "test_data_path")
_NOT_SPLIT = excludes("split", given=True, why="separate datasets are not split", way_out="remove --split")


def _read_by_types(name: str) -> Need:
    kinds = [kind for kind, made in TOKENIZERS.items() if made.pretrains and made.reads(name)]
    return Need(f"--tokenizer-type {' or '.join(kinds)}", lambda run: TOKENIZERS[run.tokenizer.kind].reads(name))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    data_path: tuple[str, ...] | None = flag(
        None,
        "Training data: PREFIX of .bin/.idx files, or WEIGHT PREFIX WEIGHT PREFIX ...",
        nargs="+",
        path=True,
        excludes=excludes("data_args_path", *_SEPARATE),
    )
    train_data_path: tuple[str, ...] | None = flag(
        None, "Training data, in the format of --data-path.", nargs="+", path=True, excludes=_NOT_SPLIT
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "Validation data, in the format of --data-path.", nargs="+", path=True, excludes=_NOT_SPLIT
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "Test data, in the format of --data-path.", nargs="+", path=True, excludes=_NOT_SPLIT
    )
    data_args_path: str | None = flag(
        None, "File with the value of --data-path, for long blends.", path=True, excludes=excludes(*_SEPARATE)
    )
    per_split_data_args_path: str | None = flag(
        None,
        'JSON file {"train": [...], "valid": [...], "test": [...]}. Each list is a value of --data-path.',
        path=True,
        excludes=(*excludes("train_data_path", "valid_data_path", "test_data_path"), *_NOT_SPLIT),
    )
    multiple_validation_sets: bool = flag(
        False,
        "Report a separate validation loss for each source of --valid-data-path, or of the valid list of "
        "--per-split-data-args-path. The sources have no weights.",
    )
    validation_set_names: tuple[str, ...] | None = flag(
        None, "Names of the validation sets. Unset: 0, 1, ...", nargs="+", needs=(_SETS,)
    )
    split: str = flag(
        "969, 30, 1",
        "Proportions of documents for training, validation and test. 0 omits the set, also with --mock-data.",
        needs=(_FILES_OR_NONE,),
    )
    split_rule: str = flag(
        "23.06", "Rounding of --split, as in Megatron-LM 23.06 or main.", choices=("23.06", "main"), needs=(_FILES,)
    )
    max_epochs: float | None = flag(
        None,
        "Largest number of epochs of any source. A run that needs more is rejected. Unset: above 4 epochs, a "
        "warning is printed.",
        above=0,
        needs=(_FILES,),
    )
    data_table_path: str | None = flag(
        None, "File for the full table of data sources. The log abbreviates a long table.", path=True
    )
    data_cache_path: str | None = flag(
        None, "Directory of the cached sample indices. Unset: beside the data.", needs=(_FILES,), path=True
    )
    seq_length: int = flag(
        0, "Tokens per sample.", at_least=1, at_most=INT32, required=True, aliases=("--encoder-seq-length",)
    )
    num_workers: int = flag(
        2, "Number of data-loading processes. 0 loads in the training process.", at_least=0, at_most=MOST_PROCESSES
    )
    dataloader_type: str = flag(
        "single",
        "Order of the samples. single: Megatron's own order; cyclic: the sampler reshuffles every epoch.",
        choices=("single", "cyclic"),
        refused={"external": "not supported; pass your own datasets to megatron.pretrain(), or use single"},
    )
    data_sharding: bool = flag(
        True,
        "Shuffle with one permutation for all ranks, so the order does not depend on the number of ranks.",
        off="--no-data-sharding",
        needs=(_CYCLIC,),
    )
    reset_position_ids: bool = flag(False, "Restart positions after each end of document.", needs=(_POSITIONS,))
    reset_attention_mask: bool = flag(False, "Block attention across documents.")
    dataloader_inter_document_masking: bool = flag(
        False, "Block attention across documents. Same as --reset-attention-mask."
    )
    eod_mask_loss: bool = flag(
        False, "Exclude from the loss the prediction of the token that follows an end of document."
    )
    mmap_bin_files: bool = flag(
        True, "Read .bin files instead of memory-mapping them.", off="--no-mmap-bin-files", needs=(_PAIRS,)
    )
    sft: bool = flag(
        False,
        "Fine-tune on conversations: data paths name JSONL files of messages. Samples pack several conversations, "
        "which do not attend to each other; only the assistant's answers count in the loss.",
        needs=(_FILES,),
        insists=True,
        excludes=excludes(
            "reset_position_ids",
            "reset_attention_mask",
            "dataloader_inter_document_masking",
            "eod_mask_loss",
            "fim_data",
            why="--sft sets the boundaries and the loss mask itself",
        ),
    )
    mock_data: bool = flag(
        False,
        "Train on synthetic tokens instead of data files.",
        excludes=(
            *excludes("data_path", "data_args_path", *_SEPARATE),
            *excludes("full_validation", "validation_samples", why="synthetic data is endless"),
        ),
    )
    accept_changed_data: bool = flag(
        False,
        "Resume even if the data, its weights or its order differ from the checkpoint's. The differences are printed.",
        cli_only=True,
        needs=(RESUME,),
    )
    fim_data: bool = flag(False, "Train fill-in-the-middle: split documents in three and move the middle to the end.")
    fim_rate: float = flag(0.5, "Share of documents that are rearranged.", at_least=0, at_most=1, needs=(_FIM,))
    fim_spm_rate: float = flag(
        0.5, "Share of rearranged documents with the suffix first.", at_least=0, at_most=1, needs=(_FIM,)
    )
    fim_split_sample: str | None = flag(
        None, "Token that splits a document into fragments, which are rearranged separately.", needs=(_FIM,)
    )
    fim_fragment_rate: float | None = flag(
        None, "Share of fragments that are rearranged, with --fim-split-sample.", at_least=0, at_most=1, needs=(_FIM,)
    )
    fim_no_prefix: str | None = flag(None, "Documents that begin with this text are not rearranged.", needs=(_FIM,))
    fim_prefix_token: str = flag("<fim_prefix>", "Token before the prefix.", needs=(_FIM,))
    fim_middle_token: str = flag("<fim_middle>", "Token before the middle.", needs=(_FIM,))
    fim_suffix_token: str = flag("<fim_suffix>", "Token before the suffix.", needs=(_FIM,))
    fim_pad_token: str = flag(
        "<fim_pad>",
        "Token that pads a sample.",
        status="no-op",
        note="rearranging only adds tokens here, so no sample is ever too short",
    )
    fim_eod_token: str = flag("<|endoftext|>", "Token at the end of each document.", needs=(_FIM,))
    object_storage_cache_path: str | None = flag(
        None, "Cache of indices from object storage.", status="later", note="copy the data to a local disk"
    )

    @property
    def may_validate(self) -> bool:
        """False only if there is certainly no validation data; True if a file or a script will decide."""
        if self.train_data_path is not None:
            return self.valid_data_path is not None
        splits = self.mock_data or (self.data_path or self.data_args_path) is not None
        return not splits or parse_split(self.split)[1] > 0

    @property
    def isolates_documents(self) -> bool:
        return self.reset_attention_mask or self.dataloader_inter_document_masking or self.sft

    @property
    def restarts_positions(self) -> bool:
        return self.reset_position_ids or self.sft

    @property
    def masks_loss(self) -> bool:
        return self.eod_mask_loss or self.sft


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    tokenizer_type: str | None = flag(
        None,
        "Kind of tokenizer. Unset: pretrain_gpt.py uses GPT2BPETokenizer.",
        choices=tuple(name for name, made in TOKENIZERS.items() if made.pretrains),
        refused=_REFUSED,
    )
    tokenizer_model: str | None = flag(
        None,
        "tokenizer.json or its directory, SentencePiece .model, or tiktoken ranks.",
        needs=(_MODEL_FILE,),
        insists=True,
        path=True,
    )
    vocab_file: str | None = flag(
        None,
        "vocab.json of a GPT-2 byte-level BPE.",
        aliases=("--vocab",),
        needs=(_read_by_types("vocab_file"),),
        insists=True,
        path=True,
    )
    merge_file: str | None = flag(
        None,
        "merges.txt of a GPT-2 byte-level BPE.",
        aliases=("--merges-file",),
        needs=(_read_by_types("merge_file"),),
        insists=True,
        path=True,
    )
    vocab_size: int | None = flag(
        None,
        "Vocabulary size of NullTokenizer and --mock-data. Otherwise from the tokenizer, or from --load if larger.",
        at_least=1,
        at_most=INT32,
    )
    tiktoken_pattern: str | None = flag(
        None,
        "Pre-tokenization pattern of TikTokenizer. Unset: v2.",
        choices=("v1", "v2"),
        needs=(_read_by_types("tiktoken_pattern"),),
    )
    tiktoken_num_special_tokens: int = flag(
        1000,
        "Number of special ids of TikTokenizer; they precede the ids of its ranks file.",
        at_least=3,
        at_most=INT32,
        needs=(_read_by_types("tiktoken_num_special_tokens"),),
    )
    tiktoken_special_tokens: tuple[str, ...] | None = flag(
        None,
        "TikTokenizer: names of its first ids, <unk> <s> </s> and others. Other tokenizers: tokens that they must "
        "contain.",
        nargs="+",
        aliases=("--tokenizer-special-tokens",),
    )
    null_tokenizer_eod_id: int | None = flag(
        None,
        "End-of-document id of NullTokenizer, below --vocab-size. Unset: an extra id after the vocabulary.",
        at_least=0,
        at_most=INT32,
        needs=(_read_by_types("null_tokenizer_eod_id"),),
        insists=True,
    )

    sft_tokenizer_prompt_format: str | None = flag(
        None,
        "Format of conversations as text. default: the tokenizer's chat template. Unset: nemotron-h-aligned with "
        "--tokenizer-type SFTTokenizer, as in Megatron-LM, else default.",
        choices=PROMPT_FORMATS,
        needs=(_SFT,),
    )

    @property
    def prompt_format(self) -> str:
        of_type = "nemotron-h-aligned" if self.tokenizer_type == "SFTTokenizer" else "default"
        return self.sft_tokenizer_prompt_format or of_type

    @property
    def kind(self) -> str:
        """Type of the tokenizer: GPT2BPETokenizer if none is given, as in Megatron."""
        return self.tokenizer_type or GPT2

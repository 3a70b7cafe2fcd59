"""Opens a trained model for use: any checkpoint that --load accepts, in any layout, on the launcher's ranks."""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.found_step import describe_step, saved_tokenizer
from megatron.checkpoint.run_state import RunHistory
from megatron.checkpoint.step_source import OWN_STEPS, StepSource
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.config import RunConfig, TokenizerConfig
from megatron.engine import Evaluation
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.model.gpt import GPT
from megatron.model.parameters import WORD_TABLE
from megatron.model.passes import Batch, Passes
from megatron.parallelize import Parallel
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from megatron.tokenizer.huggingface import text_of_token
from megatron.tokenizer_types import TOKENIZERS
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.initialize import Run, start
from megatron.training.model import build_model
from megatron.training.resume import Progress, ResumePoint
from megatron.training.settings import read_settings
from megatron.utils.dtype import DTYPES
from megatron.utils.foreign import is_hugging_face, read_finite_json
from megatron.utils.token_difference import token_difference, tokens_of

LONGEST_WINDOW = 4096
"""Window of a model if its checkpoint does not record the length of its training samples."""
DEFAULT_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Flags of tools/evaluate.py and tools/generate.py, and arguments of the harness's model."""

    load: str
    ckpt_step: int | None = None
    seq_length: int | None = None
    dtype: str | None = None
    device: str = "auto"
    kernels: str = "auto"
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    batch_size: int = DEFAULT_BATCH

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: not one of {', '.join(DTYPES)}")
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be at least 1")


@dataclass(frozen=True)
class Described:
    """Description of a checkpoint, without its weights."""

    place: str
    dtype: str
    positions: int | None
    trained_length: int | None
    tokenizer_folder: Path | None
    """Folder of the tokenizer files in the checkpoint, if any."""
    tokenizer: Tokenizer | None
    prompt_format: str | None = None
    """Prompt format of the run's --sft; None if it was the tokenizer's own template."""
    rows: int | None = None
    """Rows of the token embedding, including padding if the checkpoint does not record the number of padding rows."""


@dataclass(frozen=True)
class Subject:
    """Model in use: the run of this rank, its tokenizer, and later its weights."""

    run: Run
    options: ModelOptions
    described: Described

    @property
    def window(self) -> int:
        """Number of tokens that the model reads at once."""
        return self.run.config.data.seq_length

    @property
    def tokenizer(self) -> Tokenizer:
        if self.run.tokenizer is None:
            raise ConfigError(
                f"--load {self.options.load}: the checkpoint holds no tokenizer; give the tokenizer that the model was "
                "trained with (--vocab-file and --merge-file, or --tokenizer-type with --tokenizer-model)"
            )
        return self.run.tokenizer

    @property
    def chat_settings(self) -> TokenizerConfig:
        """Settings of the chat template, with the format that the run was trained with."""
        return replace(self.run.config.tokenizer, sft_tokenizer_prompt_format=self.described.prompt_format)

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the bos_token that the tokenizer's folder names; None without one."""
        folder = self.described.tokenizer_folder
        if folder is None or not (folder / "tokenizer_config.json").is_file():
            return None
        token = text_of_token(read_finite_json(folder / "tokenizer_config.json").get("bos_token"))
        return None if token is None else self.tokenizer.token_id(token)

    @property
    def positions(self) -> int | None:
        """Longest text in tokens; None if unlimited."""
        return self.run.config.model.max_position_embeddings

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a text: the tokenizer's end of document, and those that a Hugging Face model's files name."""
        own = frozenset() if self.tokenizer.eod_id is None else frozenset([self.tokenizer.eod_id])
        return own | named_ends(Path(self.options.load)) if self._is_hugging_face else own

    @property
    def beginning(self) -> tuple[int, ...]:
        """Ids before a prompt. A Hugging Face model has those of `transformers`; native models have none, because their
        training documents begin with text."""
        return self.tokenizer.beginning() if self._is_hugging_face else ()

    @property
    def _is_hugging_face(self) -> bool:
        return is_hugging_face(Path(self.options.load))

    @cached_property
    def built(self) -> Parallel:
        """Model with its weights; collective over all ranks."""
        run = self.run
        built = build_model(run, _model_provider, own_step, loaded_next=True)
        engine = Evaluation(built.model, built.passes, run.parallel, device=run.device)
        with closing(RunHistory(run.run_id)) as history:
            load = partial(
                RunCheckpoints(run, engine, built.specs, None, {}, history).load, Progress(), ResumePoint(None)
            )
            try:
                load(hash_later=run.device.type == "cpu")
            except DamagedCheckpointError:
                load(hash_later=False)  # verifies before it reads, and reports other steps
        return built

    @property
    def model(self) -> GPT:
        assert isinstance(self.built.model, GPT)
        return self.built.model

    @property
    def passes(self) -> Passes:
        """Passes of the model; each batch carries its forward step under "step"."""
        return self.built.passes


def open_subject(options: ModelOptions, source: StepSource = OWN_STEPS) -> Subject:
    """Reads the checkpoint's description, joins the ranks and builds the tokenizer, but reads no weights. `source`
    reads the checkpoint, by default only a native one."""
    connect = partial(start, needs_data=False, stream=sys.stderr, source=source)
    return subject_of(options, connect, source)


def subject_of(options: ModelOptions, connect: Callable[[RunConfig], Run], source: StepSource = OWN_STEPS) -> Subject:
    """Opens a model on the run that `connect` starts with its settings on this rank."""
    described = _describe(options, source)
    doubt = _doubt_of_size(options, described)
    run = connect(read_settings(_command_line(options, described), needs_data=False, source=source))
    _check_tokenizer(options, described, run.tokenizer)
    if doubt is not None:
        run.log.warn(doubt)
    return Subject(run, options, replace(described, dtype=options.dtype or described.dtype))


def named_ends(folder: Path) -> frozenset[int]:
    """Returns the `eos_token_id` (one or several) of generation_config.json or, without one, of config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = read_finite_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ids is not None:
            return frozenset(one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int))
    return frozenset()


def _describe(options: ModelOptions, source: StepSource) -> Described:
    load = Path(options.load)
    if is_hugging_face(load):
        folder = source.open_model(load)
        own = load if (load / "tokenizer.json").is_file() else None
        return Described(
            str(load),
            folder.dtype,
            folder.config.max_position_embeddings,
            None,
            own,
            _tokenizer_in(own),
            rows=folder.vocab_size,
        )
    found = describe_step(load, step=options.ckpt_step, strict=True, source=source)
    assert found is not None, "without a save directory there is no fresh start"
    saved = found.saved_settings()
    if "model" not in saved or WORD_TABLE not in found.manifest.model:
        raise CheckpointError(f"{found.directory}: not a checkpoint of a GPT and its settings; give another --load")
    own = found.tokenizer if found.tokenizer and (found.tokenizer / "tokenizer.json").is_file() else None
    return Described(
        str(found.directory),
        str(found.reader().model_dtype()).removeprefix("torch."),
        saved["model"].get("max_position_embeddings"),
        saved.get("data", {}).get("seq_length"),
        own,
        saved_tokenizer(found),
        _prompt_format(saved.get("tokenizer") or {}) if (saved.get("data") or {}).get("sft") else None,
        found.manifest.model[WORD_TABLE].logical_shape[0],
    )


def _prompt_format(saved: Mapping[str, Any]) -> str | None:
    """Returns the prompt format; None for the tokenizer's own template."""
    settings = TokenizerConfig(
        tokenizer_type=saved.get("tokenizer_type"), sft_tokenizer_prompt_format=saved.get("sft_tokenizer_prompt_format")
    )
    return None if settings.prompt_format == "default" else settings.prompt_format


def _tokenizer_in(folder: Path | None) -> Tokenizer | None:
    if folder is None:
        return None
    settings = TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return build_tokenizer(settings, announce=False)


def _command_line(options: ModelOptions, described: Described) -> list[str]:
    """Returns the flags of a training run that only evaluates this model. This way the settings are checked, and the
    model is split over ranks and loaded, as in training."""
    window = options.seq_length
    if window is None:
        window = min(described.positions or LONGEST_WINDOW, described.trained_length or LONGEST_WINDOW)
    if described.positions is not None and window > described.positions:
        raise ConfigError(
            f"--seq-length {window}: the model has only {described.positions} positions; lower --seq-length"
        )
    pieces = 2 * options.context_parallel_size if options.context_parallel_size > 1 else 1
    words = ["--load", options.load, "--finetune", "--skip-train", "--micro-batch-size", "1"]
    words += ["--train-iters", "1", "--attention-dropout", "0", "--hidden-dropout", "0"]
    words += ["--seq-length", str(max(window // pieces, 1) * pieces if options.seq_length is None else window)]
    if not is_hugging_face(Path(options.load)):
        words += ["--use-checkpoint-args", "--strict-load"]
    words += {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(options.dtype or described.dtype, [])
    given = any((options.tokenizer_type, options.tokenizer_model, options.vocab_file))
    if described.tokenizer_folder is not None and not given and not is_hugging_face(Path(options.load)):
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(described.tokenizer_folder)]
    for name in _PASSED_ON:
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


_OF_TOKENIZERS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_PASSED_ON = (
    *("ckpt_step", "device", "kernels", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", *_OF_TOKENIZERS),
)


def _check_tokenizer(options: ModelOptions, described: Described, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None or described.tokenizer is None:
        return
    given, own = tokenizer.fingerprint, described.tokenizer.fingerprint
    if given != own:
        token = token_difference(tokens_of(described.tokenizer), "the model's", tokenizer)
        raise DataError(
            f"--load {options.load}: the tokenizer given ({tokenizer.name}, fingerprint {given[:12]}) is not the "
            f"model's ({described.tokenizer.name}, fingerprint {own[:12]}){token}; remove the tokenizer's flags"
        )


def own_step(model: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
    """Calls `batch["step"]`, the forward step of this batch, with the model."""
    return batch["step"](model, batch)


def _doubt_of_size(options: ModelOptions, described: Described) -> str | None:
    """Returns a warning if the checkpoint holds no tokenizer and the given one is probably wrong, because padding does
    not explain its different size. Raises if it is certainly wrong."""
    settings = TokenizerSettings(**{name: getattr(options, name) for name in _OF_TOKENIZERS})
    made = TOKENIZERS.get(settings.tokenizer_type or "")
    own_size = made is None or not made.sized_by_settings
    if described.rows is None or described.tokenizer is not None or settings == TokenizerSettings() or not own_size:
        return None
    tokenizer = build_tokenizer(settings, announce=False)
    sizes = (
        f"--load {options.load}: its token embedding has {described.rows} rows, but the tokenizer given "
        f"({tokenizer.name}, fingerprint {tokenizer.fingerprint[:12]}) has {tokenizer.vocab_size} entries"
    )
    if tokenizer.vocab_size > described.rows:
        raise ConfigError(f"{sizes}; give the model's tokenizer")
    if described.rows > 1.1 * tokenizer.vocab_size + 128:
        return f"{sizes}; unless it is the model's tokenizer, the results are meaningless"
    return None


def _model_provider(run: Run) -> GPT:
    return GPT(
        run.config.model,
        vocab_size=run.vocab_size,
        padded_vocab_size=run.padded_vocab_size,
        kernels=run.kernels,
        moe=run.config.moe,
        recompute=run.config.recompute,
    )

"""Imports a Hugging Face folder of a known family. Code in its files never runs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.hf.exchange import Exchange
from megatron.interop.hf.families import by_model_type
from megatron.interop.hf.family import Family
from megatron.interop.hf.weights import BIN, BIN_INDEX, INDEX, WEIGHTS, WeightsFile, weights_files
from megatron.model.parameters import HEAD_TABLE, WORD_TABLE
from megatron.tokenizer.huggingface import kept_files
from megatron.torch_files.member_checks import MemberChecks, Say
from megatron.utils.dtype import DTYPES
from megatron.utils.foreign import ADAPTER, is_not_a_directory, read_finite_json


@dataclass(frozen=True)
class Stored:
    """Location of a tensor. In some files of the Hub, the names of tensors lack the model's prefix."""

    file: WeightsFile
    name: str


@dataclass(frozen=True)
class HuggingFaceFolder:
    """Description of a model on disk; no tensor has been read."""

    folder: Path
    family: Family
    config: ModelConfig
    moe: MoEConfig
    vocab_size: int
    dtype: str
    files: Mapping[str, Stored]  # by the name that transformers gives the tensor

    @property
    def model_type(self) -> str:
        return self.family.model_type

    @property
    def tokenizer_files(self) -> list[Path]:
        return [*kept_files(self.folder).values()]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns the settings as a native checkpoint would have them. The vocabulary size is the number of rows of the
        token embedding, which is often larger than the tokenizer's vocabulary."""
        window = self.config.window_size
        tokenizer: dict[str, Any] = {"vocab_size": self.vocab_size}
        if (self.folder / "tokenizer.json").is_file():
            tokenizer |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(self.folder.resolve())}
        return {
            "model": {**asdict(self.config), "window_size": window and list(window)},
            "moe": asdict(self.moe),
            "precision": {"bf16": self.dtype == "bfloat16", "fp16": self.dtype == "float16"},
            "tokenizer": tokenizer,
        }

    def tensor(self, name: str) -> Tensor:
        """Returns a mapped tensor: unused parts of it are not read."""
        stored = self.files[name]
        return stored.file.tensor(stored.name)

    def exchanges(self) -> list[Exchange]:
        """Returns the exchanges of all parameters. Rejects a folder with a missing or an unused tensor."""
        wanted = list(self.family.exchanges(self.config, self.vocab_size, self.moe))
        zeros = self.family.zero_biases(self.config, self.vocab_size)
        _check_names(self, {name for exchange in wanted for name in exchange.theirs} | zeros.keys())
        for name in zeros:
            if bool(self.tensor(name).any()):
                raise CheckpointError(
                    f"{self.folder}: {name} is not zero, but this project's model has no such bias; choose another "
                    "model"
                )
        for exchange in wanted:
            self._check_described(exchange)
        return wanted

    def _check_described(self, exchange: Exchange) -> None:
        """Checks the shapes and dtypes in the files' own descriptions, without reading a tensor."""
        stored_shape = exchange.parameter.stored_shape
        for name, expected in exchange.to_hf(torch.empty(stored_shape, device="meta")).items():
            stored = self.files[name]
            shape, dtype = stored.file.described(stored.name)
            if shape != tuple(expected.shape):
                raise CheckpointError(
                    f"{self.folder}: {name} is {_sizes(shape)}, but config.json describes {_sizes(expected.shape)}; "
                    "the files belong to different models"
                )
            if dtype not in DTYPES:
                raise CheckpointError(f"{self.folder}: {name} is {dtype:.20}; supported: {', '.join(DTYPES)}")


def open_folder(folder: Path, say: Say = lambda text: None, *, compare: bool = True) -> HuggingFaceFolder:
    """Opens a folder. With `compare`, tensors are compared with their checksums, which reads whole storages.
    `say` reports files without checksums, and settings that are not imported."""
    if not folder.is_dir():
        raise ConfigError(f"--load {folder}: {is_not_a_directory(folder)}")
    _refuse_adapter(folder)
    values = read_finite_json(folder / "config.json")
    _refuse_quantised(values)
    family = by_model_type(values.get("model_type"))
    config, moe = family.read_config(values)
    if line := family.not_taken_over(values):
        say(line)
    files = _stored_tensors(weights_files(folder, MemberChecks(say) if compare else None), family)
    vocab_size = values.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{folder / 'config.json'}: vocab_size is missing; add the model's")
    _refuse_more_than_stored(folder, config, moe, len(files))
    source = HuggingFaceFolder(folder, family, config, moe, vocab_size, _stored_dtype(files, family), files)
    source.exchanges()  # rejects missing tensors and other shapes before a model is made
    _check_tied(source)
    return source


def _check_tied(source: HuggingFaceFolder) -> None:
    """Raises if a tied head is stored and differs from the token embedding: versions of transformers disagree on which
    one to use."""
    words, head = source.family.table(WORD_TABLE), source.family.table(HEAD_TABLE)
    if source.config.tied and head in source.files and not torch.equal(source.tensor(head), source.tensor(words)):
        raise CheckpointError(
            f"{source.folder}: {head} and {words} differ, but tie_word_embeddings in config.json is true; set it to "
            f"false, or save the model without {head}"
        )


def _refuse_adapter(folder: Path) -> None:
    described = folder / ADAPTER
    if described.is_file() and not any((folder / name).is_file() for name in (WEIGHTS, INDEX, BIN, BIN_INDEX)):
        base = str(read_finite_json(described).get("base_model_name_or_path") or "its base model")
        raise ConfigError(
            f"--load {folder}: holds an adapter of {base:.200}, not a model; merge the two first (peft's "
            "merge_and_unload) and give the merged folder"
        )


def _refuse_quantised(values: Mapping[str, Any]) -> None:
    quantised = values.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        name = str(method or "by some method")
        raise ConfigError(
            f"config.json: quantization_config: the weights are quantised ({name:.40}), which is not supported; give "
            "the unquantised model"
        )


def _sizes(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _refuse_more_than_stored(folder: Path, config: ModelConfig, moe: MoEConfig, held: int) -> None:
    """Raises before the names of all tensors are generated: each layer and each expert has at least one tensor."""
    experts = len(moe.expert_layers(config.num_layers)) * (moe.num_experts or 0)
    if config.num_layers + experts > held:
        raise CheckpointError(
            f"{folder}: config.json describes {config.num_layers} layers and {experts} experts, but the weights are "
            f"{held} tensors; the files belong to different models"
        )


def read_tensors(source: HuggingFaceFolder) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yields (name, logical shape, stored tensor) of each of our parameters."""
    for exchange in source.exchanges():
        yield exchange.parameter.name, exchange.parameter.shape, read_tensor(source, exchange)


def read_tensor(source: HuggingFaceFolder, exchange: Exchange) -> Tensor:
    return exchange.from_hf(source.tensor)


def _stored_tensors(files: Iterable[WeightsFile], family: Family) -> dict[str, Stored]:
    held = {name: file for file in files for name in file.names()}
    words = family.table(WORD_TABLE)
    prefix = words.partition(".")[0] + "."
    if words not in held and words.removeprefix(prefix) in held:
        head = family.table(HEAD_TABLE)
        return {name if name == head else prefix + name: Stored(file, name) for name, file in held.items()}
    if words not in held and (wrapped := next((name for name in held if name.endswith(f".{words}")), None)):
        raise CheckpointError(
            f"{held[wrapped].path}: the names of its tensors begin with {wrapped.removesuffix(words)!r}, so the model "
            "was saved within a wrapper (DistributedDataParallel, torch.compile, PEFT); save the model inside the "
            "wrapper, with its save_pretrained()"
        )
    return {name: Stored(file, name) for name, file in held.items()}


def _stored_dtype(files: Mapping[str, Stored], family: Family) -> str:
    name = family.table(WORD_TABLE)
    if name not in files:
        raise CheckpointError(
            f"no {name} in the folder, so it is not a {family.architecture}; correct model_type in config.json"
        )
    _, found = files[name].file.described(files[name].name)
    if found not in DTYPES:
        raise CheckpointError(f"{name} is {found}; supported: {', '.join(DTYPES)}")
    return found


def _check_names(source: HuggingFaceFolder, wanted: set[str]) -> None:
    held = {name for name in source.files if not name.endswith(source.family.buffers)}
    if source.config.tied:
        held.discard(source.family.table(HEAD_TABLE))
    missing, extra = sorted(wanted - held), sorted(held - wanted)
    if missing or extra:
        raise CheckpointError(
            f"{source.folder} does not hold the model that config.json describes "
            f"(missing: {', '.join(missing[:6]) or 'none'}; unknown: {', '.join(extra[:6]) or 'none'})"
        )

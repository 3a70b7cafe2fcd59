"""Imports a Hugging Face folder of a known family; only config.json and safetensors files are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint import foreign, paths
from megatron.checkpoint.hf.export import DTYPES, INDEX, WEIGHTS
from megatron.checkpoint.hf.families import by_model_type
from megatron.checkpoint.hf.family import Family
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.model.parameters import HEAD_TABLE, WORD_TABLE
from megatron.tokenizer.huggingface import kept_files


@dataclass(frozen=True)
class HuggingFaceFolder:
    """The description of a model on disk; no tensor has been read."""

    folder: Path
    family: Family
    config: ModelConfig
    moe: MoEConfig
    vocab_size: int
    dtype: str
    files: Mapping[str, Path]  # tensor name -> file

    @property
    def tokenizer_files(self) -> list[Path]:
        return [*kept_files(self.folder).values()]


def open_folder(folder: Path) -> HuggingFaceFolder:
    if not folder.is_dir():
        raise ConfigError(f"--load {folder}: no such directory{foreign.hub_hint(folder)}")
    values = _read_json(folder / "config.json")
    family = by_model_type(values.get("model_type"))
    config, moe = family.read_config(values)
    files = _tensor_files(folder)
    vocab_size = values.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{folder / 'config.json'}: vocab_size is missing")
    return HuggingFaceFolder(folder, family, config, moe, vocab_size, _stored_dtype(files, family), files)


def read_tensors(source: HuggingFaceFolder) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """(name, logical shape, stored tensor) of each of our parameters. A tensor that would not be used is refused."""
    wanted = list(source.family.exchanges(source.config, source.vocab_size, source.moe))
    zeros = source.family.zero_biases(source.config, source.vocab_size)
    _check_names(source, {name for exchange in wanted for name in exchange.theirs} | zeros.keys())
    with ExitStack() as stack:
        read = _reader(source, stack)
        for name in zeros:
            if bool(read(name).any()):
                raise CheckpointError(
                    f"{source.folder}: {name} is not zero, but config.json says there is no such bias"
                )
        for exchange in wanted:
            try:
                stored = exchange.from_hf(read)
            except RuntimeError as error:
                raise CheckpointError(
                    f"{source.folder}: {', '.join(exchange.theirs)} do not have the shapes that config.json describes"
                ) from error
            yield exchange.parameter.name, exchange.parameter.shape, stored


def _reader(source: HuggingFaceFolder, stack: ExitStack) -> Callable[[str], Tensor]:
    opened: dict[Path, Any] = {}

    def read(name: str) -> Tensor:
        path = source.files[name]
        if path not in opened:
            opened[path] = stack.enter_context(safe_open(path, framework="pt"))
        tensor: Tensor = opened[path].get_tensor(name)
        return tensor

    return read


def _tensor_files(folder: Path) -> dict[str, Path]:
    if (folder / INDEX).is_file():
        names = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        shards = {str(shard) for shard in names.values()}
    elif (folder / WEIGHTS).is_file():
        shards = {WEIGHTS}
    else:
        raise ConfigError(
            f"--load {folder}: no {WEIGHTS}; weights in other formats are not read, save them as safetensors first"
        )
    files: dict[str, Path] = {}
    for shard in sorted(shards):
        path = paths.member(folder, shard)
        files |= dict.fromkeys(_header_names(path), path)
    return files


def _header_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error})") from error


def _stored_dtype(files: Mapping[str, Path], family: Family) -> str:
    name = family.table(WORD_TABLE)
    if name not in files:
        raise CheckpointError(f"no {name} in the folder: it is not a {family.architecture}")
    with safe_open(files[name], framework="pt") as file:
        dtype: torch.dtype = file.get_tensor(name).dtype
    found = str(dtype).removeprefix("torch.")
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
            f"(missing: {', '.join(missing[:6]) or 'none'}; not known: {', '.join(extra[:6]) or 'none'})"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: not a Hugging Face model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values

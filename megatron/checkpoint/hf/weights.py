"""The files of weights in a Hugging Face folder: safetensors, or the older `pytorch_model.bin`, whole or in shards.

A `.bin` file is a pickle: it is opened as our own checkpoints are, scanned first and weights only; no flag undoes that.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint import safe_load
from megatron.errors import CheckpointError, ConfigError
from megatron.tokenizer.huggingface import refuse_outside

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LONGEST_NAME = 255  # bytes, of any usual file system


class WeightsFile(ABC):
    """One file, opened when it is first needed; only what is used of it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> Iterable[str]: ...

    @abstractmethod
    def tensor(self, name: str) -> Tensor: ...

    @abstractmethod
    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        """The shape and dtype of a tensor, without reading it."""


class Safetensors(WeightsFile):
    @cached_property
    def _opened(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read as safetensors ({error}); if it was downloaded, download it again: a part "
                "may be missing"
            ) from error

    def names(self) -> Iterable[str]:
        return list(self._opened.keys())

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._opened.get_tensor(name)
        return found

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        found = self._opened.get_slice(name)
        return tuple(found.get_shape()), _DTYPES.get(found.get_dtype(), found.get_dtype())


class Pickled(WeightsFile):
    @cached_property
    def _content(self) -> dict[str, Tensor]:
        content = safe_load.load_file(self.path)
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
        ):
            raise CheckpointError(f"{self.path} is not a dictionary of tensors by name: not weights of transformers")
        return content

    def names(self) -> Iterable[str]:
        return list(self._content)

    def tensor(self, name: str) -> Tensor:
        return self._content[name].detach()

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        tensor = self._content[name]
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def weights_files(folder: Path) -> list[WeightsFile]:
    """All files that the folder's index names, or the one that there is; safetensors where there are both formats."""
    for index, whole, kind in ((INDEX, WEIGHTS, Safetensors), (BIN_INDEX, BIN, Pickled)):
        if (folder / index).is_file():
            return [kind(path) for path in _all_there(folder / index)]
        if (folder / whole).is_file():
            return [kind(_member(folder, whole))]
    for pattern, index in (("model-*-of-*.safetensors", INDEX), ("pytorch_model-*-of-*.bin", BIN_INDEX)):
        if part := next(folder.glob(pattern), None):
            raise CheckpointError(
                f"--load {folder}: has {part.name} and no {index}, which says what belongs together; the download is "
                "not complete: run it again"
            )
    raise ConfigError(
        f"--load {folder}: no {WEIGHTS} and no {BIN}; weights in other formats are not read, save them as safetensors "
        "first"
    )


def _all_there(index: Path) -> list[Path]:
    paths = [_member(index.parent, shard) for shard in _shards(index)]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(paths)} files, and {len(absent)} of them are not there ({', '.join(absent[:3])}); "
            "the download is not complete: run it again"
        )
    return paths


def _shards(index: Path) -> list[str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{index} has no weight_map")
    return sorted({str(shard) for shard in names.values()})


def _member(folder: Path, name: str) -> Path:
    if Path(name).name != name or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        raise CheckpointError(f"{folder}: its index names {name[:100]!r}, which is no file of its folder")
    path = folder / name
    refuse_outside(folder, path)
    return path


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: not a Hugging Face model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")

"""Weights files of a Hugging Face folder: safetensors, or the older `pytorch_model.bin`, whole or in shards.

A `.bin` file is a pickle. It is opened like our own checkpoints, scanned first and weights only; no flag changes that.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.errors import CheckpointError, ConfigError
from megatron.tokenizer.huggingface import refuse_outside
from megatron.torch_files.member_checks import MemberChecks
from megatron.torch_files.pickle_reader import Made
from megatron.torch_files.safe_load import UnsafeFileError
from megatron.torch_files.torch_file import TorchFile
from megatron.utils.foreign import read_finite_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DOWNLOADS = ".cache/huggingface/download"  # `hf download --local-dir` keeps partial files there
_LONGEST_NAME = 255  # bytes, of any usual file system


class WeightsFile(ABC):
    """File of weights, opened on first use; only the used parts are read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> Iterable[str]: ...

    @abstractmethod
    def tensor(self, name: str) -> Tensor: ...

    @abstractmethod
    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        """Returns the shape and dtype of a tensor, without reading it."""


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
    def __init__(self, path: Path, checks: MemberChecks | None) -> None:
        super().__init__(path)
        self._checks = checks

    @cached_property
    def _opened(self) -> TorchFile:
        file = TorchFile.open(self.path, self._checks)
        content = file.content if isinstance(file.content, dict) else {None: None}
        for name, value in content.items():
            if isinstance(value, Made) and not file.is_tensor(value):
                raise UnsafeFileError(
                    f"{self.path} cannot be read as plain weights: it has {value.kind.text[:60]!r}; save it with only "
                    "tensors"
                )
            if not isinstance(name, str) or not file.is_tensor(value):
                raise CheckpointError(
                    f"{self.path} is not a dictionary of tensors by name, as transformers saves; save it with "
                    "save_pretrained"
                )
        return file

    def names(self) -> Iterable[str]:
        return list(self._opened.content)

    def tensor(self, name: str) -> Tensor:
        return self._opened.tensor(self._opened.content[name])

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        file, value = self._opened, self._opened.content[name]
        return file.shape(value), str(file.dtype(value)).removeprefix("torch.")


def weights_files(folder: Path, checks: MemberChecks | None) -> list[WeightsFile]:
    """Returns all files that the folder's index names, or the single file; safetensors if there are both formats."""
    kinds = ((INDEX, WEIGHTS, Safetensors), (BIN_INDEX, BIN, partial(Pickled, checks=checks)))
    for index, whole, kind in kinds:
        if (folder / index).is_file():
            return [kind(path) for path in _all_there(folder / index)]
        if (folder / whole).is_file():
            return [kind(_member(folder, whole))]
    for pattern, index in (("model-*-of-*.safetensors", INDEX), ("pytorch_model-*-of-*.bin", BIN_INDEX)):
        if part := next(folder.glob(pattern), None):
            raise CheckpointError(
                f"--load {folder}: has {part.name} but no {index}, which lists the files; the download is not "
                "complete: run it again"
            )
    if part := next((path for place in (folder, folder / _DOWNLOADS) for path in place.glob("*.incomplete")), None):
        raise CheckpointError(
            f"--load {folder}: has neither {WEIGHTS} nor {BIN}, but {part.relative_to(folder)}; the download is not "
            "complete: run it again"
        )
    raise ConfigError(
        f"--load {folder}: no {WEIGHTS} and no {BIN}; other formats of weights are not supported; save the weights "
        "as safetensors first"
    )


def compare_share(files: Iterable[WeightsFile], number: int, count: int) -> None:
    """Compares one of `count` shares of the tensors with their checksums, where there are any."""
    tensors = [(file, name) for file in files if isinstance(file, Pickled) for name in file.names()]
    for file, name in tensors[number::count]:
        file.tensor(name)


def _all_there(index: Path) -> list[Path]:
    paths = [_member(index.parent, shard) for shard in _shards(index)]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(paths)} files, but {len(absent)} of them are missing ({', '.join(absent[:3])}); "
            "the download is not complete: run it again"
        )
    return paths


def _shards(index: Path) -> list[str]:
    names = read_finite_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{index} has no weight_map, which lists the files; download it again")
    return sorted({str(shard) for shard in names.values()})


def _member(folder: Path, name: str) -> Path:
    if Path(name).name != name or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        raise CheckpointError(
            f"{folder}: its index names {name[:100]!r}, which is not a file of its folder; download the model again"
        )
    path = folder / name
    refuse_outside(folder, path)
    return path

"""Reads a directory of torch's distributed format: which bytes of which file hold which chunk of a tensor.

`.metadata` is a pickle. It is read as a description (`torch_files/pickle_reader.py`): nothing in it is imported or
called. Before a tensor is read, the file names, the positions and the chunks are checked: the chunks must cover each
tensor exactly once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import paths
from megatron.errors import CheckpointError
from megatron.torch_files.mapped_bytes import Bytes
from megatron.torch_files.member_checks import MemberChecks
from megatron.torch_files.pickle_instructions import PickleRefused
from megatron.torch_files.pickle_reader import Made, Name, read_pickle
from megatron.torch_files.safe_load import MissingPartError, UnsafeFileError
from megatron.torch_files.torch_file import TorchFile

METADATA = ".metadata"
_ALWAYS_READ = 4 * 2**20  # bytes; larger metadata is read if the files that it describes are larger still
_LARGEST = 2**48
_MOST_DIMENSIONS = 16
Offsets = tuple[int, ...]


@dataclass(frozen=True)
class FileRange:
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Chunk:
    offsets: Offsets
    sizes: tuple[int, ...]
    place: FileRange


@dataclass(frozen=True)
class DistTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass
class DistDirectory:
    directory: Path
    tensors: Mapping[str, DistTensor]
    blobs: Mapping[str, FileRange]
    """Entries that are not tensors."""
    checks: MemberChecks | None
    _mapped: dict[str, Bytes] = field(default_factory=dict)

    def content(self, place: FileRange, key: str) -> TorchFile:
        if place.file not in self._mapped:
            path = self.directory / place.file
            if not paths.is_plain_file(path):
                raise MissingPartError(f"{path} is missing or not a plain file: the checkpoint is incomplete")
            self._mapped[place.file] = Bytes.of_file(path)
        return TorchFile(self._mapped[place.file].part(place.start, place.length), self.checks, key)

    def read(self, key: str, box: Sequence[tuple[int, int]]) -> Tensor:
        """Reads a part of the tensor `key`. `box` has the range (start, stop) of each dimension."""
        tensor = self.tensors[key]
        found = torch.empty([stop - start for start, stop in box], dtype=tensor.dtype)
        for chunk in tensor.chunks:
            common = [
                (max(a, offset), min(b, offset + size))
                for (a, b), offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in common):
                continue
            target, source = found, self._chunk(key, tensor, chunk)
            for dim, ((start, stop), (a, _), offset) in enumerate(zip(common, box, chunk.offsets, strict=True)):
                target = target.narrow(dim, start - a, stop - start)
                source = source.narrow(dim, start - offset, stop - start)
            target.copy_(source)
        return found

    def _chunk(self, key: str, tensor: DistTensor, chunk: Chunk) -> Tensor:
        file = self.content(chunk.place, key)
        found = file.tensor(file.content)
        if found.dtype != tensor.dtype or tuple(found.shape) != chunk.sizes:
            raise CheckpointError(
                f"{file.path}: {key} is {found.dtype} {tuple(found.shape)}, but in {METADATA} {tensor.dtype} "
                f"{chunk.sizes}; copy the checkpoint again"
            )
        return found


def open_directory(directory: Path, checks: MemberChecks | None) -> DistDirectory:
    path = directory / METADATA
    if not paths.is_plain_file(path):
        raise MissingPartError(f"{path} is missing: the checkpoint was never completed")
    size = path.stat().st_size
    if size > _ALWAYS_READ and size > sum(entry.lstat().st_size for entry in directory.glob("*.distcp")):
        raise CheckpointError(
            f"{path} has {size} bytes, more than the files that it describes; copy the checkpoint again"
        )
    try:
        tensors, blobs = _described(read_pickle(path.read_bytes()))
    except PickleRefused as error:
        raise UnsafeFileError(f"{path} cannot be read: {error}; copy it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return DistDirectory(directory, tensors, blobs, checks)


def _described(content: Any) -> tuple[dict[str, DistTensor], dict[str, FileRange]]:
    described = _mapping(_fields(content, "Metadata").get("state_dict_metadata"))
    places = dict(_places(_mapping(_fields(content, "Metadata").get("storage_data"))))
    tensors: dict[str, DistTensor] = {}
    blobs: dict[str, FileRange] = {}
    for key, entry in described.items():
        if not isinstance(key, str) or not isinstance(entry, Made):
            raise PickleRefused("it has an entry without a name")
        if entry.kind.last == "BytesStorageMetadata":
            if (key, None) in places:
                blobs[key] = places[key, None]
            continue
        tensors[key] = _tensor(key, _fields(entry, "TensorStorageMetadata"), places)
    return tensors, blobs


def _places(stored: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, Offsets | None], FileRange]]:
    """Yields ((name, offsets of the chunk), its bytes in a file). Entries that are not tensors have None as offsets."""
    for index, info in stored.items():
        named, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        key, offsets = named.get("fqn"), named.get("offset")
        if where.get("transform_descriptors"):
            raise PickleRefused("its files are compressed, which is not supported")
        file, start, length = where.get("relative_path"), where.get("offset"), where.get("length")
        if not isinstance(key, str) or not _is_file_name(file):
            raise PickleRefused(f"it names a file {str(file)[:60]!r}, which is not in its directory")
        start, length = _numbers((start, length))
        yield (key, None if offsets is None else _numbers(offsets)), FileRange(str(file), start, length)


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.isprintable() and 0 < len(name.encode()) < 256


def _tensor(
    key: str, fields: Mapping[str, Any], places: Mapping[tuple[str, Offsets | None], FileRange]
) -> DistTensor:  # fmt: skip
    shape = _numbers(fields.get("size"))
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Made) else None
    named = state[0] if isinstance(state, tuple) and state else _mapping(state).get("dtype")
    dtype = getattr(torch, named.last, None) if isinstance(named, Name) else None
    if not isinstance(dtype, torch.dtype):
        raise PickleRefused(f"it has no dtype of {key[:60]}")
    chunks: dict[Offsets, Chunk] = {}
    listed = fields.get("chunks")
    for each in listed if isinstance(listed, list) else []:
        values = _fields(each, "ChunkStorageMetadata")
        offsets, sizes = _numbers(values.get("offsets")), _numbers(values.get("sizes"))
        fits = len(offsets) == len(sizes) == len(shape)
        if not fits or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise PickleRefused(f"it has a chunk of {key[:60]} that is outside of the tensor")
        if prod(sizes) == 0:
            continue
        place = places.get((key, offsets))
        if place is None:
            raise PickleRefused(f"it does not state where the chunk of {key[:60]} at {offsets} is")
        if prod(sizes) * dtype.itemsize > place.length:
            raise PickleRefused(
                f"its chunk of {key[:60]} at {offsets} needs {prod(sizes) * dtype.itemsize} bytes, "
                f"but {place.length} are stored"
            )
        if chunks.setdefault(offsets, Chunk(offsets, sizes, place)).sizes != sizes:
            raise PickleRefused(f"its chunks of {key[:60]} overlap")
    if sum(prod(chunk.sizes) for chunk in chunks.values()) != prod(shape) or _overlap(list(chunks.values())):
        raise PickleRefused(f"its chunks do not cover {key[:60]} exactly once")
    return DistTensor(shape, dtype, tuple(chunks.values()))


def _overlap(chunks: list[Chunk]) -> bool:
    """Returns whether two chunks share an element. Compares only chunks that share an index of the first dimension."""
    open_ones: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets):
        if not chunk.offsets:
            return len(chunks) > 1
        open_ones = [each for each in open_ones if each.offsets[0] + each.sizes[0] > chunk.offsets[0]]
        for other in open_ones:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            ):
                return True
        open_ones.append(chunk)
    return False


def _fields(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, Made) or value.kind.last != kind:
        raise PickleRefused(f"it has no {kind} where torch writes one")
    return _mapping(value.state)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise PickleRefused("it has no dictionary where torch writes one")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
        raise PickleRefused("it has an invalid shape, offset or length")
    if not all(type(number) is int and 0 <= number < _LARGEST for number in value):
        raise PickleRefused("it has an invalid shape, offset or length")
    return tuple(value)

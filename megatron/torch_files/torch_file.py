"""Reads tensors and plain values of files that `torch.save` wrote, without torch's loader.

Names in a file are neither imported nor called (`pickle_reader.py`), and tensors are views of the mapped file.
Supported are torch's zip files, also within a larger file as in the distributed format, and torch's format before 1.6.
"""

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import CheckpointError
from megatron.torch_files.mapped_bytes import Bytes
from megatron.torch_files.member_checks import MemberChecks
from megatron.torch_files.pickle_instructions import PickleRefused
from megatron.torch_files.pickle_reader import Made, Name, Persistent, read_next, read_pickle
from megatron.torch_files.safe_load import UnsafeFileError, check_members

_BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Magic number that begins a file of torch before 1.6, as a pickle."""
_LARGEST, _MOST_DIMENSIONS = 2**48, 64  # largest number in a shape, most dimensions
_LOCAL_HEADER = struct.Struct("<26xHH")
STORAGES = {
    **{"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool},
    "UntypedStorage": torch.uint8,
}
_TYPES = (
    *(*STORAGES.values(), torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)
_BY_NAME = {str(dtype): dtype for dtype in _TYPES}
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


def dtype_named(name: str) -> torch.dtype:
    if name not in _BY_NAME:
        raise ValueError(f"{name[:40]!r} is not a dtype of a checkpoint's tensors")
    return _BY_NAME[name]


class TorchFile:
    """File whose `content` has plain values and, in place of tensors, descriptions that `tensor` reads.

    `checks` compares data with the checksums in the file. It is None if the caller verifies the bytes in another way.
    `name` names the tensor in messages if the file has only one.
    """

    def __init__(self, data: Bytes, checks: MemberChecks | None, name: str = "") -> None:
        self.path = data.path
        self._data = data
        self._checks = checks
        self._name = name
        self._storages: dict[str, Bytes] = {}
        self._members: dict[str, zipfile.ZipInfo] = {}  # of storages, which are looked up when needed
        try:
            if data.length >= len(_BEFORE_ZIP) and data.part(0, len(_BEFORE_ZIP)).read() == _BEFORE_ZIP:
                self.content = self._before_zip()
            else:
                self.content = self._zip()
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # a hostile file makes zipfile and others raise many kinds of errors
            text = str(error) if isinstance(error, PickleRefused) else f"{type(error).__name__}: {error}"
            raise UnsafeFileError(
                f"{data.path} cannot be read as plain weights: {text[:200]}; use a file that torch.save wrote with "
                "only tensors and plain values"
            ) from error

    @staticmethod
    def open(path: Path, checks: MemberChecks | None) -> "TorchFile":
        return TorchFile(Bytes.of_file(path), checks)

    def _zip(self) -> Any:
        try:
            with zipfile.ZipFile(self._data.stream()) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
            raise CheckpointError(
                f"{self.path} is not a checkpoint file of torch ({error}); copy or download it again"
            ) from error
        check_members(self.path, members, self._data.length)
        found = {member.filename.partition("/")[2]: member for member in members}
        if "data.pkl" not in found:
            raise CheckpointError(
                f"{self.path} is not a checkpoint file of torch (it has no data.pkl); copy or download it again"
            )
        if "byteorder" in found and self._member(found["byteorder"]).read() != b"little":
            raise CheckpointError(
                f"{self.path} was written on a machine of another byte order; save it again on a little-endian one"
            )
        self._members = {
            name.removeprefix("data/"): member for name, member in found.items() if name.startswith("data/")
        }
        described = self._member(found["data.pkl"])
        data = described.read()
        if self._checks is not None:
            self._checks.compare(described, found["data.pkl"].CRC, lambda: "data.pkl, which describes its content,")
        return read_pickle(data)

    def _member(self, member: zipfile.ZipInfo) -> Bytes:
        header = self._data.part(member.header_offset, _LOCAL_HEADER.size).read()
        name, extra = _LOCAL_HEADER.unpack(header)
        return self._data.part(member.header_offset + _LOCAL_HEADER.size + name + extra, member.file_size)

    def _before_zip(self) -> Any:
        if self._checks is not None:
            self._checks.lacks(self.path, "is in torch's format from before 1.6, which has no checksums")
        stream = self._data.stream()
        stream.seek(len(_BEFORE_ZIP))
        version, system, content, keys = (read_next(stream) for _ in range(4))
        if version != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
            raise CheckpointError(
                f"{self.path} was written by an unknown version of torch, or in another byte order; save it again with "
                "torch 1.6 or newer"
            )
        sizes = _storage_sizes(content)
        position = stream.tell()
        for key in keys:
            elements = int.from_bytes(self._data.part(position, 8).read(), "little")
            dtype, expected = sizes[key]
            if elements != expected:
                raise CheckpointError(
                    f"{self.path}: a storage has {elements} elements, but its tensors need {expected}; copy or "
                    "download it again"
                )
            self._storages[key] = self._data.part(position + 8, elements * dtype.itemsize)
            position += 8 + elements * dtype.itemsize
        return content

    def is_tensor(self, value: Any) -> bool:
        return self._description(value) is not None

    def shape(self, value: Any) -> tuple[int, ...]:
        """Shape of the tensor that `value` describes; the tensor is not read."""
        return self._described(value).shape

    def dtype(self, value: Any) -> torch.dtype:
        return self._described(value).dtype

    def tensor(self, value: Any, *, compare: bool = True) -> Tensor:
        """Returns the tensor that `value` describes, as a view of the mapped file. With `compare`, first reads the
        whole storage of the tensor and verifies its checksum."""
        found = self._described(value)
        storage = self._storage(found)
        if not prod(found.shape):
            return torch.empty(found.shape, dtype=found.dtype)
        member = self._members.get(found.storage)
        if compare and self._checks is not None and member is not None:
            self._checks.compare(storage, member.CRC, lambda: self._name_of(found.storage))
        elements = storage.length // found.dtype.itemsize
        flat = storage.part(0, elements * found.dtype.itemsize).tensor(found.dtype)
        return flat.as_strided(found.shape, found.stride, flat.storage_offset() + found.offset)

    def place(self, value: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        """Position of the first byte, dtype and shape of a tensor in the file; None if its elements are not in
        order."""
        found = self._described(value)
        if not found.in_order:
            return None
        storage = self._storage(found)
        return storage.start + found.offset * found.dtype.itemsize, found.dtype, found.shape

    def _storage(self, found: "_Description") -> Bytes:
        """Returns the bytes of a tensor's storage. Raises if they do not hold all of the tensor."""
        if found.storage not in self._storages and found.storage in self._members:
            self._storages[found.storage] = self._member(self._members[found.storage])
        storage = self._storages.get(found.storage)
        if storage is None:
            raise CheckpointError(f"{self.path} has a tensor whose bytes are missing; copy or download it again")
        elements, count = storage.length // found.dtype.itemsize, prod(found.shape)
        last = found.offset + sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True))
        if count and (last >= elements or count > elements):
            raise UnsafeFileError(
                f"{self.path} has a tensor of {found.shape} that is larger than its storage; copy or download it again"
            )
        return storage

    def _name_of(self, storage: str) -> str:
        """The first tensor of a storage, named by the keys that lead to it."""
        waiting: list[tuple[tuple[str, ...], Any]] = [((), self.content)]
        while waiting:
            keys, value = waiting.pop()
            found = self._description(value)
            if found is not None and found.storage == storage:
                return f"tensor {self._name or '.'.join(keys)}"
            if isinstance(value, (dict, list, tuple)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += reversed([((*keys, str(key)), each) for key, each in items])
        return f"storage {storage}"

    def _described(self, value: Any) -> "_Description":
        found = self._description(value)
        if found is None:
            raise CheckpointError(
                f"{self.path} has a {type(value).__name__} where a tensor is expected; copy or download it again"
            )
        return found

    def _description(self, value: Any) -> "_Description | None":
        try:
            return _description(value)
        except PickleRefused as error:
            raise UnsafeFileError(f"{self.path}: {error}") from error


@dataclass(frozen=True)
class _Description:
    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """True if the elements are contiguous, the last dimension first."""
        elements = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != elements:
                return False
            elements *= size
        return True


def _description(value: Any) -> _Description | None:
    """Reads the description of a tensor; None if `value` is not one."""
    if isinstance(value, Made) and value.kind.text in _PARAMETER and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Made) or value.kind.text not in _REBUILD or len(value.arguments) < 4:
        return None
    storage, offset, shape, stride = value.arguments[:4]
    named = _storage_of(storage)
    if (
        named is None
        or not (
            isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride) <= _MOST_DIMENSIONS
        )
        or not all(type(n) is int and 0 <= n < _LARGEST for n in (offset, *shape, *stride))
    ):
        raise PickleRefused("it has a tensor that is not described in the way of torch.save")
    if _is_changed(value):
        raise PickleRefused(
            "it has a tensor with a pending negation or conjugation; save it after resolve_neg() and resolve_conj()"
        )
    dtype = named[1]
    if value.kind.text == _REBUILD[1] and len(value.arguments) > 6 and isinstance(value.arguments[6], Name):
        dtype = getattr(torch, value.arguments[6].last, dtype)
    if dtype not in _TYPES:
        raise PickleRefused("it has a tensor of an unsupported dtype")
    return _Description(named[0], dtype, offset, shape, stride)


def _is_changed(tensor: Made) -> bool:
    """True if extra arguments in the pickle make torch conjugate or negate the tensor after reading."""
    return any(tensor.arguments[6 + _REBUILD.index(tensor.kind.text) :])


def _storage_of(value: Any) -> tuple[str, torch.dtype, int] | None:
    """Returns (key, dtype, number of elements) of a storage; None if `value` does not describe one."""
    parts = value.identity if isinstance(value, Persistent) else None
    if not isinstance(parts, tuple) or len(parts) < 5 or parts[0] != "storage" or any(parts[5:]):
        return None  # early versions of torch add a sixth part here: the place of a storage within another one
    kind, key, elements = parts[1], parts[2], parts[4]
    if not isinstance(kind, Name) or kind.last not in STORAGES or not isinstance(key, str) or type(elements) is not int:
        return None
    return key, STORAGES[kind.last], elements


def _storage_sizes(content: Any) -> dict[str, tuple[torch.dtype, int]]:
    """Dtype and number of elements of each storage in a file of torch before 1.6, from its tensors. The stored bytes
    themselves have no dtype."""
    found, waiting, seen = {}, [content], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list, tuple, Made)):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if named := _storage_of(value):
            found[named[0]] = named[1:]
        elif isinstance(value, Made):
            waiting += [value.arguments, value.state, value.items]
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return found


def plain_values(value: Any) -> Any:
    """Keeps only plain values and their containers. Objects become None, a namespace its values, a torch dtype its
    name, a member of an enumeration its value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Name):
        return value.last
    if isinstance(value, Made) and value.kind.text in ("argparse.Namespace", "types.SimpleNamespace"):
        return plain_values(value.state)
    if isinstance(value, Made) and len(value.arguments) == 1 and isinstance(value.arguments[0], (int, str)):
        return value.arguments[0]
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items() if isinstance(key, (str, int))}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return None

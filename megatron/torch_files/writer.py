"""Writes a file in torch's zip format sequentially: first the tensors, then the pickle that describes them. The
position of a tensor therefore depends only on the tensors before it. A deferred tensor is read when it is written, and
is freed afterwards."""

import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor

from megatron.torch_files.torch_file import STORAGES
from megatron.utils.dtype import resolved

_ALIGNMENT = 64  # of tensors in the file, in bytes, as in torch's files
_BEFORE_DATA = 30 + 20  # bytes of a zip member's header with 64-bit sizes
_PADDING = 0x4246  # type of the header field that torch uses as padding
_KINDS = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
_REBUILD, _REBUILD_AS = b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_tensor_v3\n"
_ORDERED = b"ccollections\nOrderedDict\n)R"
_PIECE = 2**20  # bytes that stay in the processor's cache while they are hashed
_NAMESPACE = b"cargparse\nNamespace\n)\x81"


class Stream(Protocol):
    """A byte stream that need not be seekable."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


class Deferred(Tensor):
    """Tensor with a known shape and dtype; `read` returns its values later."""

    read: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain

    @staticmethod
    def of(shape: Iterable[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> "Deferred":
        made: Deferred = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Deferred)
        made.read = read
        return made

    def with_rows(self, rows: int) -> "Deferred":
        """Returns the tensor padded with rows of zeros to `rows` rows."""
        return Deferred.of((rows, *self.shape[1:]), self.dtype, lambda: with_rows(self.read(), rows))


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


def values_of(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Deferred):
        return tensor
    found = tensor.read()
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), (found.shape, found.dtype, tensor)
    return found


@dataclass(frozen=True, eq=False)
class Storage:
    """Tensors of one dtype that are contiguous in a file."""

    tensors: Sequence[Tensor]
    dtype: torch.dtype
    length: int
    """Number of elements, including the zeros after the tensors."""

    def pieces(self) -> Iterator[memoryview]:
        for tensor in self.tensors:
            values = resolved(values_of(tensor).detach()).contiguous()
            yield from _pieces(values.view(-1).view(torch.uint8).numpy().data)
            del values  # before the next one is read
        unused = (self.length - sum(tensor.numel() for tensor in self.tensors)) * self.dtype.itemsize
        for start in range(0, unused, _PIECE):
            yield memoryview(bytes(min(_PIECE, unused - start)))


class _Storages:
    """Storages of a file. A tensor that is in none of the given storages gets a new one."""

    def __init__(self, given: Sequence[Storage]) -> None:
        self.all = list(given)
        self.of_tensor: dict[int, tuple[int, int]] = {}
        """Number of the storage and first element there, by the tensor's id."""
        for number, storage in enumerate(given):
            first = 0
            for tensor in storage.tensors:
                self.of_tensor[id(tensor)] = number, first
                first += tensor.numel()

    def place(self, tensor: Tensor) -> tuple[int, int]:
        if id(tensor) not in self.of_tensor:
            self.of_tensor[id(tensor)] = len(self.all), 0
            self.all.append(Storage((tensor,), tensor.dtype, tensor.numel()))
        return self.of_tensor[id(tensor)]


def write_torch_file(tree: Any, stream: Stream, storages: Sequence[Storage] = ()) -> dict[int, int]:
    """Writes `tree` of plain values and tensors. The tensors in `storages` share these storages. Returns the position
    of the first byte of each of these storages and of each tensor, by id."""
    stored = _Storages(storages)
    described = b"\x80\x02" + b"".join(_described(tree, stored)) + b"."
    starts: list[int] = []
    with zipfile.ZipFile(cast(IO[bytes], stream), "w", zipfile.ZIP_STORED) as archive:
        for number, storage in enumerate(stored.all):
            starts.append(_write_member(archive, f"archive/data/{number}", storage.pieces()))
        for name, data in (("data.pkl", described), ("byteorder", b"little"), ("version", b"3\n")):
            _write_member(archive, f"archive/{name}", _pieces(memoryview(data)))
    found = {id(storage): start for storage, start in zip(storages, starts, strict=False)}
    for tensor, (number, first) in stored.of_tensor.items():
        found[tensor] = starts[number] + first * stored.all[number].dtype.itemsize
    return found


def _write_member(archive: zipfile.ZipFile, name: str, data: Iterator[memoryview]) -> int:
    """Writes a member and returns the position of its first byte."""
    assert archive.fp is not None
    start = archive.fp.tell() + _BEFORE_DATA + len(name) + 4
    padding = -start % _ALIGNMENT
    member = zipfile.ZipInfo(name)
    member.extra = _PADDING.to_bytes(2, "little") + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(member, "w", force_zip64=True) as file:
        for piece in data:
            file.write(piece)
    return start + padding


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


def _described(value: Any, stored: _Storages) -> Iterator[bytes]:
    """Yields the opcodes of pickle's protocol 2 that make `value`; tensors are added to `stored`."""
    if value is None or isinstance(value, bool):
        yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif isinstance(value, int):
        yield _integer(value)
    elif isinstance(value, float):
        yield b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield b"X" + struct.pack("<I", len(text)) + text
    elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        yield from _tensor(value, stored)
    elif isinstance(value, Mapping):
        yield _ORDERED if isinstance(value, OrderedDict) else b"}"
        yield from _filled(b"u", [part for item in value.items() for part in item], stored)
        attributes = getattr(value, "__dict__", None)
        if attributes:
            yield from (*_described(attributes, stored), b"b")
    elif isinstance(value, Namespace):  # Megatron-LM's loaders need one
        yield from (_NAMESPACE, *_described(vars(value), stored), b"b")
    elif isinstance(value, list):
        yield from (b"]", *_filled(b"e", value, stored))
    elif isinstance(value, tuple):
        yield from _filled(b"t", value, stored)
    else:
        raise TypeError(f"a checkpoint holds plain values and tensors, not {type(value).__name__}")


def _filled(end: bytes, parts: Any, stored: _Storages) -> Iterator[bytes]:
    yield b"("
    for part in parts:
        yield from _described(part, stored)
    yield end


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(digits)]) + digits


def _tensor(tensor: Tensor, stored: _Storages) -> Iterator[bytes]:
    """Describes a tensor as torch does: `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`.
    Dtypes without a class of storage need `_rebuild_tensor_v3`, with the dtype after these."""
    number, first = stored.place(tensor)
    length, kind = stored.all[number].length, _KINDS.get(tensor.dtype)
    strides = torch.empty(tensor.shape, device="meta").stride()
    yield from (_REBUILD if kind else _REBUILD_AS, b"(", b"(", *_described("storage", stored))
    yield f"ctorch\n{kind}\n".encode() if kind else b"ctorch.storage\nUntypedStorage\n"
    identity: tuple[Any, ...] = (str(number), "cpu", length if kind else length * tensor.dtype.itemsize)
    view: tuple[Any, ...] = (first, tuple(tensor.shape), strides, False, OrderedDict())
    for end, values in ((b"tQ", identity), (b"", view)):
        for value in values:
            yield from _described(value, stored)
        yield end
    yield b"tR" if kind else f"c{str(tensor.dtype).replace('.', chr(10))}\ntR".encode()

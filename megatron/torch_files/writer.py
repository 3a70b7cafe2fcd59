"""Writes a file in torch's zip format from beginning to end: first the tensors, then what describes them. So where a
tensor lies depends on nothing but those before it. One that is deferred is read when its place in the file has come,
and let go of."""

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

_ALIGNMENT = 64  # of a tensor in the file, as torch has it
_BEFORE_DATA = 30 + 20  # bytes of a zip member's header, with the sizes of more than 4 GiB
_PADDING = 0x4246  # the kind of the field that torch pads a header with
_KINDS = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
_REBUILD, _REBUILD_AS = b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_tensor_v3\n"
_ORDERED = b"ccollections\nOrderedDict\n)R"
_PIECE = 2**20  # bytes that are summed up while they are in the processor's cache
_NAMESPACE = b"cargparse\nNamespace\n)\x81"


class Stream(Protocol):
    """It need not be able to go back."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


class Deferred(Tensor):
    """Its shape and dtype are known, its values come from `read`."""

    read: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain

    @staticmethod
    def of(shape: Iterable[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> "Deferred":
        made: Deferred = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Deferred)
        made.read = read
        return made

    def with_rows(self, rows: int) -> "Deferred":
        """Followed by rows of zeros, up to so many."""
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
    """Tensors of one type that lie in a file one after the other."""

    tensors: Sequence[Tensor]
    dtype: torch.dtype
    length: int
    """Elements. Those after the tensors are zeros."""

    def pieces(self) -> Iterator[memoryview]:
        for tensor in self.tensors:
            values = resolved(values_of(tensor).detach()).contiguous()
            yield from _pieces(values.view(-1).view(torch.uint8).numpy().data)
            del values  # before the next one is read
        unused = (self.length - sum(tensor.numel() for tensor in self.tensors)) * self.dtype.itemsize
        for start in range(0, unused, _PIECE):
            yield memoryview(bytes(min(_PIECE, unused - start)))


class _Storages:
    """The storages of a file. A tensor that is in none of those given gets one of its own."""

    def __init__(self, given: Sequence[Storage]) -> None:
        self.all = list(given)
        self.of_tensor: dict[int, tuple[int, int]] = {}
        """By id: (number of its storage, first element there)."""
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
    """Writes `tree` of plain values and tensors; those in `storages` lie there. Returns the first byte of each of these
    storages, and of each tensor, by its id."""
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
    """Returns the place of its first byte in the file."""
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
    """The opcodes of pickle's protocol 2 that make `value`; tensors are put into `stored`."""
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
    elif isinstance(value, Namespace):  # which Megatron-LM's loaders ask for
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
    """`_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`, as torch writes it; of a type that
    no storage is of, `_rebuild_tensor_v3` with the type after these."""
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

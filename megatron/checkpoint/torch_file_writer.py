"""Writes a file in torch's zip format from beginning to end, tensor by tensor. `torch.save` holds all tensors of a
file; here one that is deferred is read when its place in the file has come, and let go of."""

from __future__ import annotations

import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor

from megatron.checkpoint.deferred import holds_deferred, values_of
from megatron.checkpoint.torch_files import STORAGES

_ALIGNMENT = 64  # of a tensor in the file, as torch has it
_BEFORE_DATA = 30 + 20  # bytes of a zip member's header, with the sizes of more than 4 GiB
_PADDING = 0x4246  # the kind of the field that torch pads a header with
_KINDS = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_ORDERED = b"ccollections\nOrderedDict\n)R"
_NAMESPACE = b"cargparse\nNamespace\n)\x81"


class Stream(Protocol):
    """It need not be able to go back."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


def save_tree(tree: Any, stream: Stream) -> None:
    if holds_deferred(tree):
        write_torch_file(tree, stream)
    else:
        torch.save(tree, cast(IO[bytes], stream))


def write_torch_file(tree: Any, stream: Stream) -> None:
    """`tree` of plain values and tensors; each tensor gets a storage of its own."""
    tensors: list[Tensor] = []
    described = b"\x80\x02" + b"".join(_described(tree, tensors)) + b"."
    with zipfile.ZipFile(cast(IO[bytes], stream), "w", zipfile.ZIP_STORED) as archive:
        position = 0
        for name, data in _members(described, tensors):
            header = _BEFORE_DATA + len(name) + 4
            padding = -(position + header) % _ALIGNMENT
            member = zipfile.ZipInfo(name)
            member.extra = _PADDING.to_bytes(2, "little") + padding.to_bytes(2, "little") + bytes(padding)
            with archive.open(member, "w", force_zip64=True) as file:
                file.write(data)
            del data  # before the next one is read
            position = archive.fp.tell()  # type: ignore[union-attr]


def _members(described: bytes, tensors: list[Tensor]) -> Iterator[tuple[str, bytes | memoryview]]:
    yield "archive/data.pkl", described
    yield "archive/byteorder", b"little"
    for number, tensor in enumerate(tensors):
        values = values_of(tensor).detach().contiguous()
        yield f"archive/data/{number}", values.view(-1).view(torch.uint8).numpy().data
        del values
    yield "archive/version", b"3\n"


def _described(value: Any, tensors: list[Tensor]) -> Iterator[bytes]:
    """The opcodes of pickle's protocol 2 that make `value`; tensors are numbered and put into `tensors`."""
    if value is None or isinstance(value, bool):
        yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif isinstance(value, int):
        yield _integer(value)
    elif isinstance(value, float):
        yield b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield b"X" + struct.pack("<I", len(text)) + text
    elif isinstance(value, Tensor):
        yield from _tensor(value, tensors)
    elif isinstance(value, Mapping):
        yield _ORDERED if isinstance(value, OrderedDict) else b"}"
        yield from _filled(b"u", [part for item in value.items() for part in item], tensors)
        attributes = getattr(value, "__dict__", None)
        if attributes:
            yield from (*_described(attributes, tensors), b"b")
    elif isinstance(value, Namespace):  # which Megatron-LM's loaders ask for
        yield from (_NAMESPACE, *_described(vars(value), tensors), b"b")
    elif isinstance(value, list):
        yield from (b"]", *_filled(b"e", value, tensors))
    elif isinstance(value, tuple):
        yield from _filled(b"t", value, tensors)
    else:
        raise TypeError(f"a checkpoint holds plain values and tensors, not {type(value).__name__}")


def _filled(end: bytes, parts: Any, tensors: list[Tensor]) -> Iterator[bytes]:
    yield b"("
    for part in parts:
        yield from _described(part, tensors)
    yield end


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(digits)]) + digits


def _tensor(tensor: Tensor, tensors: list[Tensor]) -> Iterator[bytes]:
    """`_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`, as torch writes it."""
    number, strides = str(len(tensors)), torch.empty(tensor.shape, device="meta").stride()
    tensors.append(tensor)
    yield from (_REBUILD, b"(", b"(", *_described("storage", tensors))
    yield f"ctorch\n{_KINDS[tensor.dtype]}\n".encode()
    identity: tuple[Any, ...] = (number, "cpu", tensor.numel())
    view: tuple[Any, ...] = (0, tuple(tensor.shape), strides, False, OrderedDict())
    for end, values in ((b"tQ", identity), (b"tR", view)):
        for value in values:
            yield from _described(value, tensors)
        yield end

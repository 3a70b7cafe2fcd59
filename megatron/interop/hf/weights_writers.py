"""Writes a file of weights with one tensor at a time in memory: safetensors, or `pytorch_model.bin` for programs that
cannot read safetensors."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.torch_files.writer import Deferred, write_torch_file

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8  # of the first tensor's bytes
Shape = tuple[int, ...]


def write_safetensors(
    path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes `tensors`, which come in the order of `shapes`; each is released when it is written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    described = json.dumps(header, separators=(",", ":")).encode()
    described += b" " * (-len(described) % _ALIGNMENT)
    expected = iter(shapes.items())
    with open(path, "wb") as file:
        file.write(len(described).to_bytes(8, "little"))
        file.write(described)
        for name, tensor in tensors:
            assert (name, tuple(tensor.shape), tensor.dtype) == (*next(expected), dtype), name
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        assert next(expected, None) is None, "a tensor is missing"


def write_bin(
    path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes a `.bin` file. The arguments are those of `write_safetensors`."""
    coming = iter(tensors)

    def take(name: str) -> Tensor:
        found, tensor = next(coming)
        assert found == name, (found, name)
        return tensor

    described = {name: Deferred.of(shape, dtype, partial(take, name)) for name, shape in shapes.items()}
    with open(path, "wb") as file:
        write_torch_file(described, file)
    assert next(coming, None) is None, "a tensor is left over"

"""Writes a `pytorch_model.bin` tensor by tensor, for programs that read no safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.deferred import Deferred
from megatron.checkpoint.torch_file_writer import write_torch_file
from megatron.interop.hf.safetensors_file import Shape


def write_bin(
    path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """`tensors` come in the order of `shapes`, and each is let go of when it is written."""
    coming = iter(tensors)

    def take(name: str) -> Tensor:
        found, tensor = next(coming)
        assert found == name, (found, name)
        return tensor

    described = {name: Deferred.of(shape, dtype, partial(take, name)) for name, shape in shapes.items()}
    with open(path, "wb") as file:
        write_torch_file(described, file)
    assert next(coming, None) is None, "a tensor is left over"

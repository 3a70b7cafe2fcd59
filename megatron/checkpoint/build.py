"""The model that a checkpoint describes, filled with its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.reader import StepReader
from megatron.errors import CheckpointError
from megatron.model import GPT
from megatron.ops import resolve

WORDS = "embedding.word_embeddings.weight"


@torch.no_grad()
def build_model(
    reader: StepReader,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str = "auto",
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> GPT:
    """Ready to evaluate. `tensors` stand in for the checkpoint's own, if given."""
    saved = reader.manifest
    if "model" not in saved.config or WORDS not in saved.model:
        raise CheckpointError(f"{reader.directory} holds no model of ours (a GPT and its configuration)")
    with _default_dtype(dtype), device:
        model = GPT(
            model_config(saved.config["model"]),
            vocab_size=saved.model[WORDS].logical_shape[0],
            kernels=resolve(kernels, device.type),
            moe=moe_config(saved.config),
        )
    parameters = model.state_dict(keep_vars=True)
    if parameters.keys() != saved.model.keys():
        differing = sorted(parameters.keys() ^ saved.model.keys())
        raise CheckpointError(f"{reader.directory} does not fit its own configuration: {', '.join(differing[:8])}")
    for name, tensor in tensors or ((name, reader.logical(name, record)) for name, record in saved.model.items()):
        parameters[name].copy_(tensor)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

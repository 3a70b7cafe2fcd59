"""Builds the model that a checkpoint describes and fills it with its weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.reader import StepReader
from megatron.errors import CheckpointError
from megatron.model import GPT
from megatron.model.parameters import WORD_TABLE
from megatron.ops import resolve
from megatron.ops.operation import on_stderr
from megatron.ops.select import usable_library
from megatron.utils.dtype import default_dtype


@torch.no_grad()
def restore_model(
    reader: StepReader,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str = "auto",
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> GPT:
    """Builds the model and fills it, ready to evaluate. `tensors` replace the checkpoint's own weights."""
    saved = reader.manifest
    if "model" not in saved.config or WORD_TABLE not in saved.model:
        raise CheckpointError(f"{reader.directory}: not a checkpoint of a GPT and its settings; give another")
    with default_dtype(dtype), device:
        model = GPT(
            model_config(saved.config["model"]),
            vocab_size=saved.model[WORD_TABLE].logical_shape[0],
            kernels=resolve(kernels, device.type, native=usable_library(kernels, device, on_stderr)),
            moe=moe_config(saved.config),
        )
    parameters = model.state_dict(keep_vars=True)
    if parameters.keys() != saved.model.keys():
        differing = sorted(parameters.keys() ^ saved.model.keys())
        raise CheckpointError(
            f"{reader.directory}: its weights and its settings name different parameters ({', '.join(differing[:8])}); "
            "copy the whole step again"
        )
    for name, tensor in tensors or ((name, reader.logical(name, record)) for name, record in saved.model.items()):
        parameters[name].copy_(tensor)
    return model.eval()

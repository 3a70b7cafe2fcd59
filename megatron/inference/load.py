"""Loads a model and its tokenizer from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint import find_checkpoint
from megatron.checkpoint.build import restore_model, saved_tokenizer
from megatron.checkpoint.hf import DTYPES
from megatron.distributed.state import ParallelState
from megatron.errors import CheckpointError, ConfigError
from megatron.layout import Layout
from megatron.model import GPT
from megatron.tokenizer import Tokenizer
from megatron.utils.fp16_products import set_fp16_products


@dataclass(frozen=True)
class LoadedModel:
    model: GPT
    tokenizer: Tokenizer


def load_model(
    directory: Path,
    *,
    device: torch.device,
    step: int | None = None,
    dtype: str | None = None,
    kernels: str = "auto",
    log: Callable[[str], object] = print,
) -> LoadedModel:
    """Builds and fills the model that the checkpoint describes, by default in the dtype that it was trained in."""
    found = find_checkpoint(directory, parallel=ParallelState.build(Layout(1), 0), step=step, strict=True, log=log)
    assert found is not None, "without a save directory there is no fresh start"
    tokenizer = saved_tokenizer(found)
    if tokenizer is None:
        raise CheckpointError(f"{found.directory} holds no tokenizer, so text cannot be turned into ids")
    reader = found.reader()
    wanted = _dtype(dtype) if dtype else reader.model_dtype()
    if wanted == torch.float16 and device.type == "cpu":
        set_fp16_products()
    model = restore_model(reader, dtype=wanted, device=device, kernels=kernels)
    return LoadedModel(model, tokenizer)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: not one of {', '.join(DTYPES)}")
    return DTYPES[name]

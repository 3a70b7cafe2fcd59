"""Converts a Hugging Face folder to a native checkpoint, without training state."""

import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.run_state import SavedInfo, Sharded, TrainState
from megatron.errors import StorageError
from megatron.interop.conversion import Reading, Show, save_native
from megatron.interop.hf.exchange import Exchange
from megatron.interop.hf.importer import HuggingFaceFolder, read_tensor
from megatron.interop.hf.origin import read_origin
from megatron.state.shard import Shard


def import_weights(source: HuggingFaceFolder, save: Path, known_as: Path, show: Show) -> SavedInfo:
    """Saves the weights natively, with one tensor at a time in memory."""
    reading = Reading(show)

    def deferred(exchange: Exchange) -> Sharded:
        name = exchange.parameter.name
        described = exchange.from_hf(partial(_described, source))
        read = partial(read_tensor, source, exchange)
        spec = Shard(name=name, logical_shape=exchange.parameter.shape)
        return spec, reading.tensor(name, described.shape, described.dtype, read)

    params = {exchange.parameter.name: deferred(exchange) for exchange in source.exchanges()}
    return save_native(
        save,
        TrainState(params=params, config=source.settings(), origin=read_origin(source.folder).plain()),
        run_id=f"from-hf-{source.family.model_type}",
        known_as=known_as,
        release=True,
        save_tokenizer=partial(_copy_tokenizer, source) if source.tokenizer_files else None,
    )


def _described(source: HuggingFaceFolder, name: str) -> Tensor:
    stored = source.files[name]
    shape, dtype = stored.file.described(stored.name)
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _copy_tokenizer(source: HuggingFaceFolder, folder: Path) -> None:
    for path in source.tokenizer_files:
        try:
            shutil.copyfile(path, folder / path.name)
        except OSError as error:
            raise StorageError(f"{path} could not be copied to {folder} ({error.strerror})") from error

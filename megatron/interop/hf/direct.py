"""Fills a rank's part of the model from a Hugging Face folder, without a conversion. Files are mapped, and a rank reads
only its slices. The weights are bit-equal to those of an import followed by a load."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import slices
from megatron.checkpoint.all_ranks import run_on_all, share
from megatron.checkpoint.architecture import check_architecture
from megatron.checkpoint.found_step import Log
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.checkpoint.run_state import LoadedState, Sharded, Take, in_memory
from megatron.checkpoint.verify import identity_of
from megatron.config import ModelConfig, MoEConfig
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError
from megatron.interop.hf.exchange import Exchange
from megatron.interop.hf.importer import HuggingFaceFolder, open_folder
from megatron.interop.hf.weights import compare_share, weights_files
from megatron.state.division import Range
from megatron.state.shard import Shard
from megatron.torch_files.member_checks import MemberChecks


def load_hugging_face(
    folder: Path,
    *,
    parallel: ParallelState,
    params: Mapping[str, Sharded],
    take: Take | None = None,
    model_config: ModelConfig | None,
    moe_config: MoEConfig | None,
    log: Log,
) -> LoadedState:
    """Fills `params` in place, cast to their dtypes. All ranks call it; only the first one calls `log`. `take`: see
    `in_memory`. A rank reads its slices. To verify checksums, it also reads its share of the tensors that have some,
    as a whole."""
    number, count = share(lambda: identity_of((file.path for file in weights_files(folder, None)), ""), parallel.world)

    def load() -> list[str]:
        changes: list[str] = []
        compare_share(weights_files(folder, MemberChecks(changes.append)), number, count)
        source = open_folder(folder, compare=False)
        if model_config is not None:
            changes += check_architecture(source.settings(), model_config, moe_config, finetune=True)
        _fill(source, params, take)
        return changes

    for change in run_on_all(load, parallel.world):
        if parallel.world.rank == 0:
            log(f"warning: {change}")
    return LoadedState(path=folder, step=0)


@torch.no_grad()
def _fill(source: HuggingFaceFolder, params: Mapping[str, Sharded], take: Take | None) -> None:
    exchanges = {exchange.parameter.name: exchange for exchange in source.exchanges()}
    missing = [name for name in params if name not in exchanges]
    if missing:
        raise CheckpointError(
            f"{source.folder} lacks parameters of the model ({', '.join(missing[:8])}); give the folder of this model"
        )
    for name, (spec, tensor) in params.items():
        with in_memory(name, tensor, take) as target:
            _fill_one(source, exchanges[name], spec, target)


def _fill_one(source: HuggingFaceFolder, exchange: Exchange, spec: Shard, target: Tensor) -> None:
    """Fills one parameter. The folder is described as a native step whose slices are exactly those that this rank
    needs."""
    shape = exchange.parameter.shape
    each = prod(shape[spec.dim + 1 : spec.dim + spec.fold])  # number of indices of `ranges` per index of `dim`
    spans = {(start * each, stop * each): (start, stop) for start, stop in needed(spec)}
    parts = tuple(
        Slice("", (), (counted,), (*shape[: spec.dim], stop - start, *shape[spec.dim + 1 :]))
        for counted, (start, stop) in spans.items()
    )

    def read(piece: Slice) -> Tensor:
        assert piece.ranges is not None
        return exchange.part_from_hf(source.tensor, spec.dim, spans[piece.ranges[0]])

    slices.fill(spec, target, TensorRecord(shape, "as stored", spec.dim, parts, spec.fold), read, cast=True)


def needed(spec: Shard) -> list[Range]:
    """Returns the ranges of dimension `dim` (unfolded) that contain what `spec` holds. Several ranges of `spec` may
    share an index, such as a group's queries and key."""
    each = prod(spec.logical_shape[spec.dim + 1 : spec.dim + spec.fold])
    spans: list[Range] = []
    for start, stop in sorted((start // each, -(-stop // each)) for start, stop in spec.held):
        if spans and start <= spans[-1][1]:
            start, stop = spans[-1][0], max(stop, spans.pop()[1])
        spans.append((start, stop))
    return spans or [(0, 0)]  # a rank with nothing but padding rows

"""Exports a verified native checkpoint to a folder that `transformers` opens offline."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.found_step import FoundStep, saved_tokenizer
from megatron.checkpoint.reader import StepReader
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.conversion import Show, no_progress, written_aside
from megatron.interop.hf.exchange import Exchange, gain_less_one
from megatron.interop.hf.families import choose, keeping_tokenizer
from megatron.interop.hf.family import Facts, Family
from megatron.interop.hf.origin import GENERATION, origin_of, own_token_ids
from megatron.interop.hf.weights import BIN, BIN_INDEX, INDEX, WEIGHTS
from megatron.interop.hf.weights_writers import Shape, write_bin, write_safetensors
from megatron.model.parameters import WORD_TABLE
from megatron.tokenizer.for_transformers import JSON, TokenizerFiles
from megatron.utils.dtype import DTYPES

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Export:
    """Plan of an export, made before anything is written."""

    reader: StepReader
    config: ModelConfig
    family: Family
    facts: Facts
    moe: MoEConfig
    generation: Mapping[str, Any] | None
    """Content of generation_config.json; None writes no such file."""
    shard_bytes: int = SHARD_BYTES
    """Largest number of bytes of weights in a file; a single tensor may exceed it."""
    as_bin: bool = False
    """True to write pytorch_model.bin instead of safetensors."""
    tokenizer: TokenizerFiles | None = None
    instead_of: Family | None = None
    """Family that was not chosen, because transformers would change the tokenizer in its folder."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.facts.dtype]

    @property
    def bytes(self) -> int:
        return sum(prod(e.parameter.stored_shape) for e in self.exchanges) * self.dtype.itemsize

    @property
    def exchanges(self) -> list[Exchange]:
        return list(self.family.exchanges(self.config, self.facts.vocab_size, self.moe))


def plan_export(
    found: FoundStep,
    *,
    dtype: str | None = None,
    token_ids: Mapping[str, int | None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    as_bin: bool = False,
) -> Export:
    """Chooses the family, and checks that the checkpoint holds exactly its tensors. Special token ids are `token_ids`,
    or those of the tokenizer. An imported model keeps its original ids."""
    saved = found.manifest
    if "model" not in saved.config:
        raise CheckpointError(f"{found.directory} holds no configuration of a GPT; only GPTs can be exported")
    config = model_config(saved.config["model"])
    moe = moe_config(saved.config)
    origin = origin_of(saved.origin, found.directory)
    usual = choose(config, moe, came_as=None if origin is None else origin.model_type)
    words = saved.model.get(WORD_TABLE)
    if words is None:
        raise CheckpointError(f"{found.directory} holds no token embedding; only GPTs can be exported")
    trained = words.dtype.removeprefix("torch.")
    if dtype is None and trained not in DTYPES:
        raise ConfigError(
            f"--dtype: {trained} weights cannot be exported in their own dtype; give one of {', '.join(DTYPES)}"
        )
    context = config.max_position_embeddings or int(saved.config.get("data", {}).get("seq_length") or 0)
    rows, tokenizer = words.logical_shape[0], found.tokenizer_files
    has_json = tokenizer is not None and tokenizer.has_json
    family = keeping_tokenizer(usual, tokenizer.json(JSON), config, moe) if tokenizer and has_json else usual
    ids = token_ids or own_token_ids(saved_tokenizer(found), tokenizer.roles(rows) if tokenizer and has_json else {})
    generation: Mapping[str, Any] | None = {"pad_token_id": ids["eos_token_id"], **ids}
    if origin is not None:
        ids, generation = origin.token_ids, origin.generation
    export = Export(
        found.reader(),
        config,
        family,
        Facts(rows, dtype or trained, context, ids),
        moe,
        generation,
        shard_bytes,
        as_bin,
        tokenizer,
        instead_of=None if family is usual else usual,
    )
    _check_complete(export, found)
    return export


def _check_complete(export: Export, found: FoundStep) -> None:
    expected = {e.parameter.name: e.parameter.shape for e in export.exchanges}
    held = {name: record.logical_shape for name, record in found.manifest.model.items()}
    if expected != held:
        differing = sorted(n for n in expected.keys() | held.keys() if expected.get(n) != held.get(n))
        raise CheckpointError(
            f"{found.directory} does not hold the model that its configuration describes; tensors that differ: "
            f"{', '.join(differing[:8])}"
        )


def write_export(
    export: Export,
    out: Path,
    *,
    overwrite: bool = False,
    check: Callable[[Path], object] | None = None,
    log: Callable[[str], object] = print,
    show: Show = no_progress,
) -> None:
    """Writes to a temporary folder, checks it, and renames it, so `out` is always complete and checked."""
    if out.exists() and not overwrite:
        raise ConfigError(f"--save {out}: exists already; give another folder, or --overwrite")
    with written_aside(out, "writing the export") as temporary:
        _write_files(export, temporary, log, show)
        if check is not None:
            check(temporary)


def _write_files(export: Export, folder: Path, log: Callable[[str], object], show: Show) -> None:
    if export.tokenizer is not None:
        for name, content in export.tokenizer.portable(export.facts.vocab_size).items():
            (folder / name).write_bytes(content)
        for line in export.tokenizer.left_out():
            log(f"warning: {line}")
    else:
        log("warning: the checkpoint has no tokenizer, so the export has none either")
    _write_weights(export, folder, log, show)
    _write_json(folder / "config.json", export.family.config_json(export.config, export.moe, export.facts))
    if export.generation is not None:
        _write_json(folder / GENERATION, export.generation)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_weights(export: Export, folder: Path, log: Callable[[str], object], show: Show) -> None:
    """Writes one file, or numbered shards, with one tensor in memory at a time."""
    shards = _plan_shards(export)
    zeros = export.family.zero_biases(export.config, export.facts.vocab_size)
    whole, index_file, write = (BIN, BIN_INDEX, write_bin) if export.as_bin else (WEIGHTS, INDEX, write_safetensors)
    stem, _, suffix = whole.partition(".")
    so_far, index, total = _SoFar(export.bytes, show), dict[str, str](), 0
    for number, shard in enumerate(shards, 1):
        name = whole if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        added = zeros if number == len(shards) else {}
        shapes = {theirs: shape for exchange in shard for theirs, shape in _shapes(exchange).items()}
        shapes |= {theirs: tuple(tensor.shape) for theirs, tensor in added.items()}
        tensors = chain(_converted(export, shard, so_far), ((n, t.to(export.dtype)) for n, t in added.items()))
        write(folder / name, shapes, export.dtype, tensors)
        index |= dict.fromkeys(shapes, name)
        total += sum(prod(shape) for shape in shapes.values()) * export.dtype.itemsize
        if len(shards) > 1:
            log(f"wrote {name}")
    if len(shards) > 1:
        _write_json(folder / index_file, {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})
    if so_far.error > 0:
        log(f"--dtype {export.facts.dtype}: the largest rounding error of a weight is {so_far.error:.3e}")
    log(f"wrote {total} bytes of {export.facts.dtype} weights in {len(shards)} file(s)")


@dataclass
class _SoFar:
    total: int
    show: Show
    done: int = 0
    error: float = 0.0
    """Largest rounding error of a weight."""

    def add(self, error: float, size: int) -> None:
        self.error = max(self.error, error)
        self.done += size
        self.show(self.done, self.total)


def _shapes(exchange: Exchange) -> dict[str, Shape]:
    described = exchange.to_hf(torch.empty(exchange.parameter.stored_shape, device="meta"))
    return {name: tuple(tensor.shape) for name, tensor in described.items()}


def _converted(export: Export, shard: Sequence[Exchange], so_far: _SoFar) -> Iterator[tuple[str, Tensor]]:
    for exchange in shard:
        tensors, error = _convert(export, exchange)
        so_far.add(error, sum(tensor.nbytes for tensor in tensors.values()))
        while tensors:
            name = next(iter(tensors))
            yield name, tensors.pop(name)


def _plan_shards(export: Export) -> list[list[Exchange]]:
    shards: list[list[Exchange]] = [[]]
    size = 0
    for exchange in export.exchanges:
        need = torch.Size(exchange.parameter.stored_shape).numel() * export.dtype.itemsize
        if shards[-1] and size + need > export.shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(exchange)
        size += need
    return shards


def _convert(export: Export, exchange: Exchange) -> tuple[dict[str, Tensor], float]:
    name = exchange.parameter.name
    stored = export.reader.logical(name, export.reader.manifest.model[name])
    error = 0.0
    converted = {}
    for theirs, tensor in exchange.to_hf(stored).items():
        narrowed = tensor.to(export.dtype)
        if narrowed.dtype != tensor.dtype and narrowed.numel():
            error = max(error, float((narrowed.to(torch.float64) - tensor.to(torch.float64)).abs().max()))
        converted[theirs] = narrowed
    if not error < float("inf"):
        raise ConfigError(
            f"--dtype {export.facts.dtype}: {name} has values outside of its range; use bfloat16 or float32"
        )
    return converted, error


def our_tensors(export: Export) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of our own model, as the export rounds them."""
    for name in export.reader.manifest.model:
        tensor = exported_tensor(export, name)
        yield name, tensor.float() - 1 if gain_less_one(export.config, name) else tensor


def exported_tensor(export: Export, name: str) -> Tensor:
    """Returns a parameter's logical view as an import reads it, in the export's dtype. A gain that is stored as
    gamma - 1 is rounded as gamma."""
    tensor = export.reader.logical(name, export.reader.manifest.model[name])
    return (tensor.float() + 1 if gain_less_one(export.config, name) else tensor).to(export.dtype)

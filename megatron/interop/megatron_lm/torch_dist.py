"""Maps keys and shapes in the `torch_dist` directories of Megatron-LM's main branch to our parameters.

Layers may be stacked along a first dimension, and experts along the next one. The optimizer state has the shape of its
parameter, or is flat for each part of the grid that tensor parallelism cuts it into.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import paths
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm.advice import NOT_A_GPT, SAVE_AGAIN
from megatron.interop.megatron_lm.common import STATE, common_content
from megatron.interop.megatron_lm.dcp import METADATA, DistDirectory, open_directory
from megatron.interop.megatron_lm.names import layer_pattern
from megatron.interop.megatron_lm.optimizer_state import UnknownOptimizerError
from megatron.interop.megatron_lm.step import (
    MegatronStep,
    Sources,
    described_model,
    opened_step,
    refuse_unknown_tensors,
)
from megatron.model.parameters import FINAL_NORM, VOCABULARY_TABLES, WORD_TABLE, Parameter
from megatron.torch_files.member_checks import MemberChecks
from megatron.torch_files.torch_file import plain_values

BACKEND = "metadata.json"
_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\..*|chained_\d+\..*")
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master", "param": "master"}
"""Kinds of state by their name in Megatron-LM. The master is `param` in the fully reshardable form."""
_HALF = (torch.float16, torch.bfloat16)
_STACKED = "decoder.layers."


@dataclass(frozen=True)
class _Source:
    """Location of a parameter within a tensor: the tensor's key, and the indices of the leading dimensions."""

    key: str
    lead: tuple[int, ...]


def is_torch_dist(directory: Path) -> bool:
    if not paths.is_plain_directory(directory) or (directory / paths.MANIFEST).exists():
        return False
    return any((directory / name).exists() for name in (METADATA, BACKEND))


def open_torch_dist(directory: Path, checks: MemberChecks | None) -> MegatronStep:
    _check_backend(directory)
    found = open_directory(directory, checks)
    content, file = common_content(found)
    args = plain_values(content.get("args"))
    args = args if isinstance(args, dict) else {}
    model = described_model(directory, args, _layers(found), lambda: _table_rows(found), core=True)
    sources: Sources = {}
    places = {name: _place(found, parameter) for name, parameter in model.wanted.items()}
    records = {
        name: _record(found, parameter, places[name], places[name].key, sources)
        for name, parameter in model.wanted.items()
    }
    refuse_unknown_tensors(directory, _unknown(found, {place.key for place in places.values()}))
    return opened_step(
        directory,
        file,
        content,
        args,
        model,
        records,
        lambda: _optimizer(found, model.wanted, places, sources),
        sources,
    )


def _check_backend(directory: Path) -> None:
    path = directory / BACKEND
    if not path.exists():
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        backend = values.get("sharded_backend")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}); copy it again") from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{directory} is in the distributed format {_printable(backend)}, which is not supported; with the "
            "program that wrote it, save it again with --ckpt-format torch_dist or torch"
        )


def _printable(value: Any) -> str:
    text = str(value)[:40]
    return text if text.isprintable() else ascii(text)


def _layers(found: DistDirectory) -> int:
    numbers, stacked = set(), 0
    for key, tensor in found.tensors.items():
        if match := re.match(r"decoder\.layers\.(\d+)\.", key):
            numbers.add(int(match[1]))
        elif key.startswith(_STACKED) and tensor.shape:
            stacked = max(stacked, tensor.shape[0])
    return max(stacked, max(numbers, default=-1) + 1)


def _table_rows(found: DistDirectory) -> int:
    if WORD_TABLE not in found.tensors:
        raise CheckpointError(f"{found.directory} has no {WORD_TABLE}: it is not a GPT of Megatron-LM; {NOT_A_GPT}")
    return found.tensors[WORD_TABLE].shape[0]


def _candidates(parameter: Parameter) -> Iterator[_Source]:
    name = parameter.name
    if parameter.layer is None:
        yield _Source(f"decoder.{name}" if name.startswith(f"{FINAL_NORM}.") else name, ())
        return
    patterns = [layer_pattern(name, generation) for generation in ("te", "core")]
    for pattern in (each for each in dict.fromkeys(patterns) if each is not None):
        expert = parameter.expert
        options: list[tuple[str, tuple[int, ...]]] = [(pattern.replace("{e}", str(expert)), ())]
        if expert is not None:
            if "local_experts" not in pattern:
                continue
            joined = pattern.replace("local_experts.{e}.", "experts.")
            options = [(joined, (expert,)), (pattern.replace("local_experts.{e}.", f"experts.{expert}."), ())]
        for inside, lead in options:
            yield _Source(f"{_STACKED}{parameter.layer}.{inside}", lead)
            yield _Source(f"{_STACKED}{inside}", (parameter.layer, *lead))


def _place(found: DistDirectory, parameter: Parameter) -> _Source:
    tried = list(_candidates(parameter))
    source = next((each for each in tried if each.key in found.tensors), None)
    if source is None:
        raise CheckpointError(f"{found.directory} has no {tried[0].key}: its args describe another model; {SAVE_AGAIN}")
    shape, lead = found.tensors[source.key].shape, source.lead
    inner = shape[len(lead) :]
    if parameter.row.name in VOCABULARY_TABLES:
        fits = len(inner) == 2 and inner[0] >= parameter.shape[0] and inner[1] == parameter.shape[1]
    else:
        fits = inner == parameter.stored_shape
    if not fits or any(index >= size for index, size in zip(lead, shape, strict=False)):
        raise CheckpointError(
            f"{found.directory}: {source.key} has shape {shape}, but the checkpoint's saved args give "
            f"{parameter.stored_shape}" + (f" for entry {lead} of it" if lead else "")
        )
    return source


def _record(found: DistDirectory, parameter: Parameter, place: _Source, key: str, sources: Sources) -> TensorRecord:
    """Records the parameter, and adds its reader to `sources`. `key` names its own tensor, or one of the optimizer."""
    shape = found.tensors[place.key].shape[len(place.lead) :]
    piece = Slice(key, tuple(map(str, place.lead)), None, shape)
    if key == place.key or found.tensors[key].shape == found.tensors[place.key].shape:
        sources[piece.file, piece.key] = lambda: _read(found, key, place.lead)
    else:
        sources[piece.file, piece.key] = lambda: _read_flat(found, key, place)
    dtype = str(found.tensors[key].dtype)
    return TensorRecord(parameter.shape, dtype, parameter.row.split_dim or 0, (piece,), parameter.row.fold)


def _read(found: DistDirectory, key: str, lead: tuple[int, ...]) -> Tensor:
    inner = found.tensors[key].shape[len(lead) :]
    box = [*((index, index + 1) for index in lead), *((0, size) for size in inner)]
    return found.read(key, box).view(inner)


def _read_flat(found: DistDirectory, key: str, place: _Source) -> Tensor:
    """Reads a grid of flat parts: [parts along each dimension..., elements of one part]."""
    whole, lead = found.tensors[place.key].shape, place.lead
    *parts, elements = found.tensors[key].shape
    local = [size // count for size, count in zip(whole, parts, strict=True)]
    inner = whole[len(lead) :]
    result = torch.empty(inner, dtype=found.tensors[key].dtype)
    first = [index // size for index, size in zip(lead, local, strict=False)]
    for position in product(*(range(count) for count in parts[len(lead) :])):
        at = (*first, *position)
        flat = found.read(key, [*((index, index + 1) for index in at), (0, elements)]).view(local)
        for index, size in zip(lead, local, strict=False):
            flat = flat[index % size]
        target = result
        for dim, (index, size) in enumerate(zip(position, local[len(lead) :], strict=True)):
            target = target.narrow(dim, index * size, size)
        target.copy_(flat)
    return result


def _is_grid(whole: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    *parts, elements = shape
    if len(parts) != len(whole) or any(n < 1 or size % n for size, n in zip(whole, parts, strict=False)):
        return False
    return prod(parts) * elements == prod(whole)


def _unknown(found: DistDirectory, used: set[str]) -> list[str]:
    return [
        key
        for key in found.tensors
        if key not in used and not _OF_OPTIMIZER.fullmatch(key) and "_extra_state" not in key
        if not key.startswith("rng_state")
    ]


def _optimizer(
    found: DistDirectory, wanted: Mapping[str, Parameter], places: Mapping[str, _Source], sources: Sources
) -> dict[str, dict[str, TensorRecord]]:
    state: dict[tuple[str, str], str] = {}
    for key in found.tensors:
        if match := STATE.fullmatch(key):
            kind, of = _KINDS[match[1]], match[2]
            if other := state.get((kind, of)):
                raise UnknownOptimizerError(
                    f"{found.directory} has the {kind} of {of} twice, as {other} and as {key}; {SAVE_AGAIN}"
                )
            state[kind, of] = key
    if not state:
        flat = [key for key in found.tensors if _OF_OPTIMIZER.fullmatch(key)]
        if flat:
            raise UnknownOptimizerError(
                f"{found.directory}: the optimizer's state is stored in the buckets of the ranks that saved it "
                f"({flat[0][:80]}) and cannot be read for another layout. In Megatron-LM, save the checkpoint again "
                "with --dist-ckpt-optim-fully-reshardable"
            )
        return {}
    records: dict[str, dict[str, TensorRecord]] = {}
    for name, parameter in wanted.items():
        if not parameter.row.trained:
            continue
        place = places[name]
        dtype = found.tensors[place.key].dtype
        for kind in ("exp_avg", "exp_avg_sq", *(["master"] if dtype in _HALF else [])):
            if (kind, place.key) not in state:
                raise UnknownOptimizerError(f"{found.directory} has no {kind} of {place.key}; {SAVE_AGAIN}")
            key = state[kind, place.key]
            whole, shape = found.tensors[place.key].shape, found.tensors[key].shape
            if shape != whole and not _is_grid(whole, shape):
                raise UnknownOptimizerError(
                    f"{found.directory}: {key} has shape {shape}, but its parameter {whole}; {SAVE_AGAIN}"
                )
            records.setdefault(name, {})[kind] = _record(found, parameter, place, key, sources)
    return records

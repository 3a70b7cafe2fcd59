"""Maps the tree `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` of Megatron-LM to our parameters: which rank's file holds
which slice. `torch_files/torch_file.py` opens the files without running their code."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint import paths
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm.advice import NOT_A_GPT, SAVE_AGAIN
from megatron.interop.megatron_lm.names import HEAD_COPY, candidates, flat_names
from megatron.model.parameters import HEAD_TABLE, QKV, VOCABULARY_TABLES, WORD_TABLE, Parameter, layer_of
from megatron.state.division import even_ranges
from megatron.state.shard import Shard, splits_columns
from megatron.torch_files.member_checks import MemberChecks
from megatron.torch_files.safe_load import MissingPartError
from megatron.torch_files.torch_file import TorchFile, plain_values

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_OF_LAYER = re.compile(r"layers\.(\d+)\.")
_CHUNK = re.compile(r"model(\d*)")
_HEAD_COPIES = (HEAD_COPY, HEAD_TABLE)
_ROWS_COMPARED = 64
_QKV_NAMES = (f"{QKV}.weight", f"{QKV}.bias")


@dataclass(frozen=True)
class ModelRank:
    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class ModelChunk:
    """Layers of one pipeline stage, or of one of its virtual stages, as stored by one rank."""

    at: ModelRank
    key: str
    """Key in the file: `model`, or `model0` and so on."""
    tensors: Mapping[str, Any]
    """Tensors by flat name, in the order of the file, which is the order of Megatron-LM's parameters."""

    @cached_property
    def layers(self) -> int:
        numbers = {int(match[1]) for name in self.tensors if (match := _OF_LAYER.match(name))}
        if numbers != set(range(len(numbers))):
            raise CheckpointError(
                f"{self.key} has layers {sorted(numbers)[:8]}, but some numbers before the last one are missing; copy "
                "the checkpoint again"
            )
        return len(numbers)


@dataclass(frozen=True)
class SliceLocation:
    """Location of one slice of a parameter."""

    at: ModelRank
    chunk: str
    name: str
    """Flat name in the file."""


@dataclass(frozen=True)
class ClassicTree:
    directory: Path
    files: Mapping[ModelRank, TorchFile]
    tp: int
    pp: int
    ep: int
    checks: MemberChecks | None
    """Checksum tests of the files; None if they are skipped."""

    @property
    def first(self) -> TorchFile:
        return self.files[ModelRank(0, 0, 0)]

    @cached_property
    def args(self) -> dict[str, Any]:
        found = plain_values(self.first.content.get("args"))
        return found if isinstance(found, dict) else {}

    @property
    def version(self) -> float:
        """Checkpoint version, which decides the order of the rows of QKV."""
        found = self.first.content.get("checkpoint_version", 0)
        if type(found) not in (int, float) or not 0 <= found < 4:
            raise CheckpointError(f"{self.directory} has checkpoint_version {str(found)[:40]}; supported: 0 to 3")
        return float(found)

    @cached_property
    def chunks(self) -> Mapping[ModelRank, tuple[ModelChunk, ...]]:
        """Chunks of every rank: its virtual stages in order."""
        return {at: tuple(_chunks(at, file)) for at, file in self.files.items()}

    @cached_property
    def stages(self) -> tuple[tuple[int, int, int], ...]:
        """Tuples (stage, virtual stage, its first layer) in the order of the layers."""
        counts = {pp: [chunk.layers for chunk in self.chunks[ModelRank(0, pp, 0)]] for pp in range(self.pp)}
        virtual = {len(layers) for layers in counts.values()}
        if len(virtual) != 1:
            raise CheckpointError(
                f"{self.directory}: its pipeline stages have different numbers of virtual stages: {sorted(virtual)}; "
                "copy all folders of one step"
            )
        found, first = [], 0
        for chunk in range(virtual.pop()):
            for pp in range(self.pp):
                found.append((pp, chunk, first))
                first += counts[pp][chunk]
        return tuple(found)

    @property
    def is_core(self) -> bool:
        """True for a core model; models of 23.06 have other names."""
        return any(".linear_qkv." in name for name in self.chunks[ModelRank(0, 0, 0)][0].tensors)

    def layers(self) -> int:
        pp, chunk, first = self.stages[-1]
        return first + self.chunks[ModelRank(0, pp, 0)][chunk].layers

    def stage_of(self, name: str) -> tuple[int, int, int]:
        layer = layer_of(name)
        if layer is None:
            return self.stages[0] if name == WORD_TABLE or "position_embeddings" in name else self.stages[-1]
        return next(stage for stage in reversed(self.stages) if stage[2] <= layer)

    def record(self, parameter: Parameter, experts: int) -> tuple[TensorRecord, dict[Slice, SliceLocation]]:
        """Returns the record of one parameter, and the location of each of its slices."""
        row, name = parameter.row, parameter.name
        if row.name in _QKV_NAMES:
            self._check_order(row.shape[1])
        ep, local = (0, None) if parameter.expert is None else divmod(parameter.expert, max(experts // self.ep, 1))
        pp, chunk, first = self.stage_of(name)
        layer = None if parameter.layer is None else parameter.layer - first
        names = candidates(name, layer, local)
        places: dict[Slice, SliceLocation] = {}
        dtypes = set()
        for tp in range(1 if row.split_dim is None else self.tp):
            at = ModelRank(tp, pp, ep)
            held = self.chunks[at][chunk]
            found = next((each for each in names if each in held.tensors), None)
            if found is None:
                raise CheckpointError(
                    f"{self.directory} has no {names[0]}: its args describe another model; {SAVE_AGAIN}"
                )
            file, stored = self.files[at], held.tensors[found]
            shape = file.shape(stored)
            dtypes.add(str(file.dtype(stored)))
            ranges = self._ranges(parameter, tp, shape)
            _check_shape(self.directory, parameter, ranges, shape)
            places[Slice(f"{tp}.{pp}.{ep}", (held.key, found), ranges, shape)] = SliceLocation(at, held.key, found)
        if len(dtypes) != 1:
            raise CheckpointError(
                f"{self.directory}: {name} is {' and '.join(sorted(dtypes))} on different ranks; {SAVE_AGAIN}"
            )
        record = TensorRecord(parameter.shape, dtypes.pop(), row.split_dim or 0, tuple(places), row.fold)
        return record, places

    def _ranges(self, parameter: Parameter, tp: int, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
        row = parameter.row
        if row.split_dim is None or self.tp == 1:
            return None
        size = prod(row.shape[row.split_dim : row.split_dim + row.fold])
        if row.name in VOCABULARY_TABLES:  # split with its padding
            return ((min(tp * shape[0], size), min((tp + 1) * shape[0], size)),)
        if row.shape[row.split_dim] % self.tp:
            raise CheckpointError(
                f"{self.directory}: {parameter.name} has {row.shape[row.split_dim]} parts, which {self.tp} "
                f"ranks cannot share equally; {SAVE_AGAIN}"
            )
        return even_ranges(size, self.tp, tp)

    def _check_order(self, slots: int) -> None:
        """Rejects an unknown order of rows. `slots`: the queries of a group, its key and its value."""
        if self.version < 2 and slots != 3:
            raise CheckpointError(
                f"{self.directory} has checkpoint_version {self.version:g} and grouped-query attention, which "
                "only later versions have. So the order of its rows is unknown; save it as version 3 with the program "
                "that wrote it"
            )

    def ours(self, parameter: Parameter, stored: Tensor) -> Tensor:
        """Returns a slice of the weight or of the optimizer state, with rows in our order."""
        if parameter.row.name in _QKV_NAMES and self.version < 2:
            stored = _heads_first(stored, parameter.shape[2], self.version)
        return stored.contiguous()

    def refuse_another_head(self) -> None:
        """Raises if a tied model's head differs from the token embedding. The last pipeline stage has this head as a
        copy, which is not loaded. A wrong table differs in all rows, so a few rows are compared, without checksums."""
        pp, chunk, _ = self.stages[-1]
        for tp in range(self.tp):
            first, last = ModelRank(tp, 0, 0), ModelRank(tp, pp, 0)
            words = self.files[first].tensor(self.chunks[first][0].tensors[WORD_TABLE], compare=False)
            for name in _HEAD_COPIES:
                stored = self.chunks[last][chunk].tensors.get(name)
                copy = words if stored is None else self.files[last].tensor(stored, compare=False)
                rows = slice(None, None, max(len(words) // _ROWS_COMPARED, 1))
                if copy.shape != words.shape or (copy[rows] - words[rows]).norm() > 0.5 * words[rows].norm():
                    raise CheckpointError(
                        f"{self.directory}: its {name} differs from its token embedding, but its args state that they "
                        f"are tied (untie_embeddings_and_output_weights); {SAVE_AGAIN}"
                    )

    def unknown(self, used: set[SliceLocation], *, tied: bool) -> list[str]:
        """Returns tensors of the files that belong to no parameter."""
        copies = _HEAD_COPIES if tied and self.pp > 1 else ()
        names = {(place.at.pp, place.at.ep, place.chunk, place.name) for place in used}
        return [
            name
            for at, chunks in self.chunks.items()
            for chunk in chunks
            for name in chunk.tensors
            if at.tp == 0 and name not in copies and (at.pp, at.ep, chunk.key, name) not in names
            if at.ep == 0 or ".experts." in name
        ]


def open_tree(directory: Path, checks: MemberChecks | None) -> ClassicTree:
    ranks = sorted(entry.name for entry in directory.iterdir() if entry.name.startswith("mp_rank_"))
    matches = {name: _RANK.fullmatch(name) for name in ranks}
    if not all(matches.values()):
        strange = next(name for name, match in matches.items() if match is None)
        raise CheckpointError(
            f"{directory / strange} is not a folder of a rank of Megatron-LM (mp_rank_TT_PPP_EEE); move it elsewhere"
        )
    first = TorchFile.open(paths.member(directory, f"{ranks[0]}/{paths.MODEL_FILE}"), checks)
    if not isinstance(first.content, dict):
        raise CheckpointError(f"{first.path} holds no dictionary: it is not a checkpoint of Megatron-LM; {NOT_A_GPT}")
    args = plain_values(first.content.get("args"))
    args = args if isinstance(args, dict) else {}
    files: dict[ModelRank, TorchFile] = {}
    for name, match in matches.items():
        assert match is not None
        numbers = [int(number) for number in match.groups() if number is not None]
        at = _coordinates(numbers, args)
        path = paths.member(directory, f"{name}/{paths.MODEL_FILE}")
        file = first if name == ranks[0] else TorchFile.open(path, checks)
        if not isinstance(file.content, dict):
            raise CheckpointError(
                f"{file.path} holds no dictionary: it is not a checkpoint of Megatron-LM; {NOT_A_GPT}"
            )
        files[at] = file
    sizes = [max(getattr(at, axis) for at in files) + 1 for axis in ("tp", "pp", "ep")]
    if prod(sizes) != len(files):
        raise MissingPartError(
            f"{directory} is incomplete: it has {len(files)} of the {prod(sizes)} folders of "
            f"TP {sizes[0]}, PP {sizes[1]}, EP {sizes[2]}"
        )
    told = args.get("tensor_model_parallel_size"), args.get("pipeline_model_parallel_size")
    if any(type(size) is int and size != found for size, found in zip(told, sizes, strict=False)):
        raise MissingPartError(
            f"{directory} is incomplete: its args have TP {told[0]}, PP {told[1]}, but its folders are of "
            f"TP {sizes[0]}, PP {sizes[1]}"
        )
    tp, pp, ep = sizes
    return ClassicTree(directory, files, tp, pp, ep, checks)


def _coordinates(numbers: list[int], args: Mapping[str, Any]) -> ModelRank:
    """Parses the ranks in a folder's name. The second of two numbers is the pipeline rank, or without a pipeline the
    expert-parallel rank."""
    if len(numbers) == 2 and args.get("pipeline_model_parallel_size", 2) == 1:
        return ModelRank(numbers[0], 0, numbers[1])
    return ModelRank(*(*numbers, 0, 0)[:3])


def _chunks(at: ModelRank, file: TorchFile) -> Iterator[ModelChunk]:
    keys = sorted((k for k in file.content if isinstance(k, str) and _CHUNK.fullmatch(k)), key=lambda k: (len(k), k))
    if not keys:
        raise CheckpointError(f"{file.path} has no model: it is not a checkpoint of Megatron-LM; {NOT_A_GPT}")
    for key in keys:
        tensors = dict(flat_names(file.content[key]))
        strange = [name for name, value in tensors.items() if not file.is_tensor(value)]
        if strange:
            raise CheckpointError(f"{file.path} has an entry {strange[0][:100]} that is not a tensor; {SAVE_AGAIN}")
        yield ModelChunk(at, key, tensors)


def _check_shape(
    directory: Path, parameter: Parameter, ranges: tuple[tuple[int, int], ...] | None, shape: tuple[int, ...]
) -> None:
    row = parameter.row
    spec = Shard(parameter.name, row.shape, row.split_dim or 0, ranges, fold=row.fold)
    rows, *columns = parameter.stored_shape
    if row.name in VOCABULARY_TABLES:
        fits = len(shape) == 2 and shape[1:] == tuple(columns) and shape[0] >= spec.local_shape[0]
    else:
        fits = prod(shape) == prod(spec.local_shape) and len(shape) == len(parameter.stored_shape)
        fits &= splits_columns(spec, rows) or shape[1:] == tuple(columns)
    if not fits:
        raise CheckpointError(
            f"{directory}: {parameter.name} has shape {shape} on a rank, but its args describe {row.shape}"
            + ("" if ranges is None else f" of which a rank has {spec.local_shape}")
            + f"; {SAVE_AGAIN}"
        )


def _heads_first(rows: Tensor, width: int, version: float) -> Tensor:
    """Reorders rows [3, heads, width] (before 1.0) or [heads, width, 3] (1.0) as [heads, 3, width]."""
    heads, rest = rows.shape[0] // (3 * width), rows.shape[1:]
    if version < 1:
        return rows.view(3, heads, width, *rest).transpose(0, 1).reshape(rows.shape)
    return rows.view(heads, width, 3, *rest).transpose(1, 2).reshape(rows.shape)

"""Content that one rank writes: its tensors in the classic tree, and a record of the logical slice of each tensor.

After writing, each rank stores its records in a small file, called its note, beside its other files. The rank that
makes the manifest reads all notes. Ranks need no communication for this, so a background thread can do it. Notes are
deleted before the step is committed, so they are not synced.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic
from megatron.checkpoint.architecture import model_config
from megatron.checkpoint.manifest import DividedFiles, Manifest, Slice, TensorRecord
from megatron.checkpoint.positions import kind_in_file, place_in_division, share_lengths
from megatron.checkpoint.run_state import Sharded, TrainState, rank_file, share_file, writes
from megatron.checkpoint.storage import FileRecord
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import CheckpointError, NonFiniteError
from megatron.model.parameters import VOCABULARY_TABLES, WORD_TABLE, classic_path, layer_of
from megatron.state.division import DEALT, Division, Members, dealt
from megatron.state.shard import Shard
from megatron.torch_files.writer import Deferred, Storage, with_rows
from megatron.utils import durable
from megatron.utils.dtype import is_finite
from megatron.utils.typed import json_value, typed

_Divided = tuple[Division, tuple[str, ...], Tensor]
"""Division of a tensor, the tensor's key, and this rank's part."""
Copy = Callable[[Tensor], Tensor]
"""Function that copies a tensor to host memory, contiguous and with its own storage. A view into a flat buffer would be
saved with the whole buffer."""


def plain_copy(tensor: Tensor) -> Tensor:
    """Copies a tensor to host memory, unless it is already there, contiguous and with its own storage. Used for saves
    during which no tensor changes."""
    if isinstance(tensor, Deferred):
        return tensor
    tensor = tensor.detach()
    own = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" and own and tensor.is_contiguous():
        return tensor
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


Records = dict[str, TensorRecord]


@dataclass(frozen=True)
class Share:
    """A rank's place in a division of tensors, and its file."""

    file: str
    number: int
    of: int
    starts: dict[str, int] = field(default_factory=dict)
    """First byte of each kind of optimizer state in this file, as in `DividedFiles` of the manifest."""
    order: str = ""
    """Digest of the divided tensors in their order: the same on all ranks."""


@dataclass(frozen=True)
class Part:
    """Files and records that one rank has written."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    model: Records = field(default_factory=dict)
    optimizer: dict[str, Records] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    """This rank's share of each division, by the division's name."""


@dataclass
class RankContent:
    """Everything that one rank writes, in host memory."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    part: Part = field(default_factory=Part)
    divided: dict[tuple[str, str], Storage] = field(default_factory=dict)
    """Storages of this rank's parts of divided tensors, by (name of the division, kind)."""
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    """All tensors, with their names for messages."""

    def storages(self, file: str) -> list[Storage]:
        return [storage for (name, _), storage in self.divided.items() if self.part.shares[name].file == file]

    def written(self, file: str, record: FileRecord, starts: Mapping[int, int]) -> None:
        """Records a written file, and the first byte of its storages and tensors. `starts` maps the `id()` of each
        object to its first byte."""
        self.part.files[file] = record
        for records in (self.part.model, *self.part.optimizer.values()):
            for name, tensor in records.items():
                (piece,) = tensor.slices
                if piece.file == file:
                    start = starts[id(classic.lookup(self.files[file], piece.key))]
                    records[name] = replace(tensor, slices=(replace(piece, start=start),))
        for (name, kind), storage in self.divided.items():
            if self.part.shares[name].file == file:
                self.part.shares[name].starts[kind] = starts[id(storage)]

    def check_finite(self) -> None:
        """Raises if a tensor is not finite. Deferred tensors are checked when they are read."""
        for name, tensor in self.tensors:
            if not isinstance(tensor, Deferred):
                check_finite(name, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    if not is_finite(tensor):
        raise NonFiniteError(f"{name} holds NaN or infinite values; no checkpoint is written")


@torch.no_grad()
def rank_content(
    state: TrainState, parallel: ParallelState, arguments: Mapping[str, Any], copy: Copy = plain_copy
) -> RankContent:
    """Copies everything that this rank writes. `arguments` come from `classic_arguments`."""
    content, own_file = RankContent(), share_file(parallel)

    def kept(name: str, tensor: Tensor) -> Tensor:
        copied = copy(tensor)
        content.tensors.append((name, copied))
        return copied

    rng = None if state.rng is None else [_plain_or_tensor(state.rng)]
    writer = writes(parallel)
    if parallel.dp_cp.size > 1 and (state.optimizer is not None or rng is not None):
        content.files[own_file] = {
            "checkpoint_version": classic.CHECKPOINT_VERSION,
            "iteration": state.iteration,
            "optimizer": {"state": {}},
            "rng_state": None if writer else rng,
            "has_manifest": True,
        }
    if writer:
        content.files[rank_file(parallel)] = _main_content(state, parallel, arguments, rng, content.part, kept)
    _optimizer(state, parallel, content, kept)
    return content


def _main_content(
    state: TrainState,
    parallel: ParallelState,
    arguments: Mapping[str, Any],
    rng: list[Any] | None,
    part: Part,
    kept: Callable[[str, Tensor], Tensor],
) -> dict[str, Any]:
    """Returns the content of a `model_optim_rng.pt`, without the optimizer's tensors."""
    padded = arguments.get("padded_vocab_size")
    padded_rows = None if padded is None else int(padded) // parallel.tp.size
    base = min((layer for name in state.params if (layer := layer_of(name)) is not None), default=0)
    tensors: dict[tuple[str, ...], Tensor] = {}
    for name, (spec, tensor) in state.params.items():
        if name in VOCABULARY_TABLES:  # before the copy, which may be asynchronous
            tensor = _pad_rows(tensor, padded_rows)
        stored = kept(name, tensor)
        key = ("model", *classic_path(name, base))
        tensors[key[1:]] = stored
        part.model[name] = _record(spec, stored, Slice(rank_file(parallel), key, spec.ranges, tuple(stored.shape)))
    optimizer = {"state": {}, "extra": _plain_or_tensor(state.optimizer_extra)}
    return {
        "args": classic.attribute_dict(arguments),
        "checkpoint_version": classic.CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "model": classic.nest(tensors),
        "optimizer": None if state.optimizer is None else optimizer,
        "opt_param_scheduler": classic.plain(state.scheduler),
        "rng_state": rng,
        "config": classic.plain(state.config),
        "data": classic.plain(state.data),
        "has_manifest": True,  # without its manifest the checkpoint is incomplete
        **({"extra": _plain_or_tensor(state.extra)} if state.extra else {}),
    }


def classic_arguments(state: TrainState, tp: int) -> dict[str, Any]:
    """Returns `args` for old tools: derived from the model's settings, then overridden by `state.args`."""
    derived: dict[str, Any] = {}
    words = state.params.get(WORD_TABLE)
    if "model" in state.config and words is not None:
        derived = classic.model_arguments(model_config(state.config["model"]), words[0].logical_shape[0], tp)
    return {
        **derived,
        **state.args,
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_valid_samples": state.consumed_valid_samples,
    }


def _optimizer(
    state: TrainState, parallel: ParallelState, content: RankContent, kept: Callable[[str, Tensor], Tensor]
) -> None:
    """Adds the optimizer state that this rank saves: its parts of divided state, and its share of replicated state."""
    shared = _dealt(state)
    divided: dict[tuple[Members, str], list[_Divided]] = {}
    for name, kinds in (state.optimizer or {}).items():
        division, alone = shared.get(name) or _division(kinds), name in state.replicas
        if division is None and not (alone or writes(parallel)):
            continue
        file = share_file(parallel) if division is not None or alone else rank_file(parallel)
        if division is not None:
            content.part.shares[division.group.name] = Share(file, division.group.rank, division.group.size)
        first = division is None or division.group.rank == 0
        if first:
            content.part.optimizer[name] = {}
        saved = content.files[file]["optimizer"]["state"].setdefault(name, {})
        shape = tuple(state.params[name][1].shape) if name in state.params else ()
        for kind, (spec, tensor) in kinds.items():
            key, cut = ("optimizer", "state", name, kind), None
            if name in state.params and spec.logical_shape == state.params[name][0].logical_shape:
                cut = division
            piece, mine = Slice(file, key, spec.ranges, tuple(tensor.shape)), tensor
            if cut is not None:
                mine = tensor if spec.division is not None else tensor.reshape(-1)[slice(*cut.held)]
                assert mine.numel() == cut.held[1] - cut.held[0], f"{name} ({kind}): {mine.shape} is not {cut.held}"
                piece = Slice(cut.group.name, key, spec.ranges, shape, cut.share, cut.offset, cut.row)
            if first:
                content.part.optimizer[name][kind] = _record(spec, tensor, piece)
            if mine.numel() if cut is not None else first:
                mine = saved[kind] = kept(f"{name} ({kind})", mine)
            if cut is not None:
                divided.setdefault((cut.group, kind_in_file(kind, mine.dtype)), []).append((cut, key, mine))
    content.divided = _storages(divided, content.part.shares)


def _storages(
    divided: Mapping[tuple[Members, str], list[_Divided]], shares: dict[str, Share]
) -> dict[tuple[str, str], Storage]:
    """Groups parts into storages, by division and kind. A storage begins at the same byte in all files of its division:
    each storage before it is padded to the longest among the ranks. Storages of larger groups of ranks come first,
    because each smaller group lies within a larger one. One exception: the first replica's file gets less of the
    replicated state (`_dealt`) and is not padded for it. Storages of that state may begin at another byte there."""

    def order(of: tuple[Members, str]) -> tuple[int, str, int, str]:
        return -of[0].size, of[0].name, -sum(division.elements for division, *_ in divided[of]), of[1]

    found: dict[tuple[str, str], Storage] = {}
    for group, kind in sorted(divided, key=order, reverse=True):
        parts = sorted(divided[group, kind], key=lambda part: place_in_division(*part[:2]))
        tensors, share = [part[2] for part in parts if part[2].numel()], shares[group.name]
        described = [(key, cut.elements, cut.share, cut.offset, cut.row) for cut, key, _ in parts]
        shares[group.name] = replace(share, order=sha256(repr((share.order, kind, described)).encode()).hexdigest())
        length, is_dealt = sum(tensor.numel() for tensor in tensors), any(part[0].row == DEALT for part in parts)
        if length or found:
            if found and not (is_dealt and group.rank == 0):
                length = int(share_lengths(part[0] for part in parts)[int(is_dealt) :].max())
            found[group.name, kind] = Storage(tensors, parts[0][2].dtype, length)
    return dict(reversed(found.items()))


def _division(kinds: Mapping[str, Sharded]) -> Division | None:
    """Division of one parameter's state among ranks. Some kinds of state, such as row sums, are whole on each rank."""
    return next((shard.division for shard, _ in kinds.values() if shard.division is not None), None)


def _dealt(state: TrainState) -> dict[str, Division]:
    """Divides replicated optimizer state among the replicas, so that each saves a part. The first replica, which also
    writes the weights, gets a smaller part."""
    by_axis: dict[str, tuple[Axis, list[str]]] = {}
    for name, kinds in (state.optimizer or {}).items():
        axis = state.replicas.get(name)
        if axis is not None and axis.size > 1 and kinds and _division(kinds) is None:
            by_axis.setdefault(axis.name, (axis, []))[1].append(name)
    found: dict[str, Division] = {}
    for axis, names in by_axis.values():
        weights = {name: state.params[name][1] for name in names}
        sizes = {name: weight.numel() for name, weight in weights.items()}
        first = (state.optimizer or {})[names[0]].values()
        per_element = sum(tensor.element_size() for _, tensor in first if tensor.numel() == sizes[names[0]]) or 1
        of_weights = sum(size * weights[name].element_size() for name, size in sizes.items())
        found |= dealt(sizes, axis.members, of_weights // per_element)
    return found


def _plain_or_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _plain_or_tensor(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_or_tensor(item) for item in value]
    return classic.plain(value)


def _pad_rows(tensor: Tensor, rows: int | None) -> Tensor:
    if rows is None or rows <= tensor.shape[0]:
        return tensor
    return tensor.with_rows(rows) if isinstance(tensor, Deferred) else with_rows(tensor, rows)


def _record(spec: Shard, tensor: Tensor, piece: Slice) -> TensorRecord:
    shape = tuple(spec.logical_shape)
    return TensorRecord(logical_shape=shape, dtype=str(tensor.dtype), dim=spec.dim, slices=(piece,), fold=spec.fold)


# ---------------------------------------------------------------- notes of all ranks


def _path(folder: Path, rank: int) -> Path:
    return folder / f"written_by_rank_{rank}.json"


def leave_note(folder: Path, rank: int, part: Part) -> None:
    durable.write_synced(_path(folder, rank), [json.dumps(json_value(part)).encode()], sync=False)


def collect_notes(folder: Path, ranks: Iterable[int]) -> list[Part]:
    """Reads and deletes the notes of these ranks."""
    found = []
    for rank in ranks:
        path = _path(folder, rank)
        try:
            found.append(typed(Part, json.loads(path.read_bytes())))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); all ranks must run the same version") from None
        path.unlink()
    return found


def join_notes(header: Manifest, parts: list[Part]) -> Manifest:
    """Completes the manifest of a step from the notes of all ranks."""
    names = sorted({name for part in parts for name in part.optimizer})
    return replace(
        header,
        files={name: record for part in parts for name, record in part.files.items()},
        model=merge_records(part.model for part in parts),
        optimizer={
            name: merge_records(part.optimizer[name] for part in parts if name in part.optimizer) for name in names
        },
        divisions=divisions(parts),
    )


def divisions(parts: Iterable[Part]) -> dict[str, DividedFiles]:
    shares: dict[str, dict[int, Share]] = {}
    for part in parts:
        for name, share in part.shares.items():
            shares.setdefault(name, {})[share.number] = share
    found = {}
    for name, by_number in shares.items():
        size = next(iter(by_number.values())).of
        assert sorted(by_number) == list(range(size)), f"{name}: shares {sorted(by_number)} of {size}"
        in_order = [by_number[number] for number in range(size)]
        assert len({share.order for share in in_order}) == 1, f"{name}: ranks divide different tensors or orders"
        starts = {kind: start for share in in_order for kind, start in share.starts.items()}
        for share in in_order[1:]:  # a file without elements of a kind has no start for it
            assert share.starts.items() <= starts.items(), f"{name}: {share.file} has {share.starts}, others {starts}"
        first = in_order[0].starts
        less = {} if first.items() <= starts.items() else first
        found[name] = DividedFiles(tuple(share.file for share in in_order), starts, less)
    return found


def merge_records(parts: Iterable[Records]) -> Records:
    """Merges the records of all ranks: one per logical tensor, with each of its slices once."""
    whole: Records = {}
    slices: dict[str, dict] = {}
    for part in parts:
        for name, record in part.items():
            first = whole.setdefault(name, record)
            assert replace(first, slices=()) == replace(record, slices=()), name
            slices.setdefault(name, {}).update(dict.fromkeys(record.slices))
    return {name: replace(record, slices=tuple(slices[name])) for name, record in whole.items()}

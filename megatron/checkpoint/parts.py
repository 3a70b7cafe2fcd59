"""What each rank has written of a step, left beside its files for the rank that makes the manifest.

Files, because nothing has to be sent then: no rank holds what all others wrote, and a thread beside the training can do
it. They are gone before the step is committed, so they are not synced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.checkpoint.manifest import DividedFiles, Manifest, TensorRecord
from megatron.checkpoint.storage import FileRecord
from megatron.errors import CheckpointError
from megatron.utils import durable
from megatron.utils.typed import json_value, typed

Records = dict[str, TensorRecord]


@dataclass(frozen=True)
class Share:
    """A rank's place among those that divide tensors: its file is one of the division's."""

    file: str
    number: int
    of: int
    starts: dict[str, int] = field(default_factory=dict)
    """As of `DividedFiles` in the manifest, of the kinds that it has."""


@dataclass(frozen=True)
class Part:
    """What one rank has written."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    model: Records = field(default_factory=dict)
    optimizer: dict[str, Records] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    """By the names of the divisions."""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"written_by_rank_{rank}.json"


def leave(folder: Path, rank: int, part: Part) -> None:
    durable.write_synced(_path(folder, rank), [json.dumps(json_value(part)).encode()], sync=False)


def collect(folder: Path, ranks: Iterable[int]) -> list[Part]:
    """What these ranks have left; it is removed."""
    found = []
    for rank in ranks:
        path = _path(folder, rank)
        try:
            found.append(typed(Part, json.loads(path.read_bytes())))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); all ranks must run the same version") from None
        path.unlink()
    return found


def joined(header: Manifest, parts: list[Part]) -> Manifest:
    """The manifest of a step, from what all ranks have written of it."""
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
        starts = {kind: start for share in in_order for kind, start in share.starts.items()}
        for share in in_order[1:]:  # a file has no start of a kind that it has nothing of
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

"""Selects the datasets of a merge, their order and grouping, and the name of each output."""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.data.indexed.dataset import bin_path, idx_path, without_ending
from megatron.errors import ConfigError

_PART = re.compile(r"(?P<base>.+)_part(?P<rank>\d+)_of_(?P<world>\d+)_(?P<rest>.+)")
_NAMED = 5


@dataclass(frozen=True)
class Group:
    """Inputs that are merged into one output."""

    output: str
    prefixes: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """Partition according to a dataset's name: `base_part002_of_004_text_document` is rank 2 of 4."""

    base: str
    rest: str
    rank: int
    world: int


def partition_of(prefix: str) -> Partition | None:
    found = _PART.fullmatch(prefix)
    if found is None:
        return None
    return Partition(found["base"], found["rest"], int(found["rank"]), int(found["world"]))


def find_prefixes(inputs: Sequence[str], output: str) -> list[str]:
    """Expands prefixes, patterns and folders to prefixes sorted by name. Skips the output of an earlier merge."""
    found: list[str] = []
    for word in inputs:
        if Path(word).is_dir():
            found += [name for name in _pairs_in(Path(word)) if not _is_output(name, output)]
        elif glob.has_magic(word) and not os.path.lexists(idx_path(word)):
            found += _matches(word)
        else:
            found.append(without_ending(word))
    for prefix in found:
        if found.count(prefix) > 1:
            raise ConfigError(
                f"--input: {prefix} is given twice; give it once (to repeat data, use weights in --data-path)"
            )
    return found


def _pairs_in(folder: Path) -> list[str]:
    names = {str(path.with_suffix("")) for path in folder.iterdir() if path.suffix in (".bin", ".idx")}
    for name in sorted(names):
        for path in (bin_path(name), idx_path(name)):
            if not os.path.lexists(path):
                raise ConfigError(
                    f"--input {folder}: {path.name} is missing, but the other file of its .bin/.idx pair exists; copy "
                    f"{path.name} again, or move the other file away"
                )
    if not names:
        raise ConfigError(f"--input {folder}: contains no .bin and .idx files; give the folder of the datasets")
    return sorted(names)


def _matches(pattern: str) -> list[str]:
    paths = {without_ending(path) for path in glob.glob(pattern) if path.endswith((".bin", ".idx"))}
    paths |= {path.removesuffix(".idx") for path in glob.glob(f"{pattern}.idx")}
    if not paths:
        raise ConfigError(f"--input {pattern}: matches no dataset; check the pattern")
    return sorted(paths)


def _is_output(prefix: str, output: str) -> bool:
    """True for the name of the output, and for OUTPUT_KEY_document, its name in a merge of several keys."""
    same_folder = Path(prefix).parent.resolve() == Path(output).parent.resolve()
    name, own = Path(prefix).name, Path(output).name
    keyed = name.startswith(f"{own}_") and name.endswith(("_document", "_sentence"))
    return same_folder and (name == own or (keyed and partition_of(name) is None))


def plan_groups(prefixes: Iterable[str], output: str) -> list[Group]:
    """Makes one group per JSON key. Orders the partitions of a run by rank, and raises if one is missing."""
    units: dict[tuple[str, str], list[str]] = {}  # the partitions of one run, or a single dataset
    for prefix in prefixes:
        part = partition_of(prefix)
        units.setdefault((prefix, "") if part is None else (part.base, part.rest), []).append(prefix)
    by_key: dict[str, list[str]] = {}
    for (base, rest), members in units.items():
        by_key.setdefault(rest, []).extend(_in_order(base, rest, members) if rest else members)
    if len(by_key) == 1:
        groups = [Group(output, tuple(members)) for members in by_key.values()]
    elif "" in by_key:
        keys = ", ".join(sorted(key for key in by_key if key))
        raise ConfigError(
            f"--input: {by_key[''][0]} is not a partition, but other inputs are partitions (of {keys}); merge them "
            "separately"
        )
    else:
        groups = [Group(f"{output}_{key}", tuple(members)) for key, members in by_key.items()]
    for group in groups:
        _refuse_output_as_input(group)
    return groups


def _in_order(base: str, rest: str, members: list[str]) -> list[str]:
    parts = {prefix: found for prefix in members if (found := partition_of(prefix)) is not None}
    worlds = sorted({part.world for part in parts.values()})
    if len(worlds) > 1:
        raise ConfigError(
            f"--input: {base}: some inputs are partitions of {worlds[0]}, others of {worlds[1]}; move the older run's "
            "files away"
        )
    by_rank: dict[int, str] = {}
    for prefix, part in parts.items():
        if part.rank in by_rank:
            raise ConfigError(
                f"--input: {prefix} and {by_rank[part.rank]} are both partition {part.rank}; give only one"
            )
        by_rank[part.rank] = prefix
    missing = [str(rank) for rank in range(worlds[0]) if rank not in by_rank]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ConfigError(
            f"--input: {base}_part..._{rest}: partition {', '.join(missing[:_NAMED])}{more} of {worlds[0]} is missing; "
            f"run tools/preprocess_data.py with --rank {missing[0]} --world {worlds[0]}"
        )
    beyond = [prefix for rank, prefix in by_rank.items() if rank >= worlds[0]]
    if beyond:
        raise ConfigError(
            f"--input: {beyond[0]}: its number is too high, because the {worlds[0]} partitions have the numbers 0 to "
            f"{worlds[0] - 1}; move its files away"
        )
    return [by_rank[rank] for rank in range(worlds[0])]


def _refuse_output_as_input(group: Group) -> None:
    for prefix in group.prefixes:
        if os.path.realpath(bin_path(prefix)) == os.path.realpath(bin_path(group.output)):
            raise ConfigError(f"--output-prefix {group.output}: is also an input; choose another name")

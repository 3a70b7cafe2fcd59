"""Finds the newest complete local step: each rank's share is on some machine, undamaged."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import manifest, paths
from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.content import join_notes
from megatron.checkpoint.lineage import Line
from megatron.checkpoint.local import share
from megatron.checkpoint.local.replica_folder import ReplicaFolder
from megatron.checkpoint.local.share import ShareRecord
from megatron.checkpoint.local.transfer import LocalStep
from megatron.checkpoint.positions import Positions
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class Seen:
    """A share that a rank sees."""

    step: int
    save: str
    rank: int
    ranks: int


@dataclass(frozen=True)
class Verdict:
    """Result of verifying one copy of a share at one place. Its `problem` is None if the copy is undamaged."""

    rank: int
    place: str
    problem: str | None


def newest_first(saves: Iterable[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    return sorted(saves, reverse=True)


@dataclass(frozen=True)
class Search:
    """Finds the newest complete local step, with the shares that this rank sees. All ranks make the same calls."""

    store: ReplicaFolder
    world: Axis
    line: Line
    check_hashes: bool

    def newest(self) -> tuple[LocalStep | None, list[str]]:
        """Returns the newest complete step, and lines for the log about newer ones that were skipped."""
        mine = run_on_all(self._mine, self.world)
        seen = all_gather_json(list(mine), self.world, list[Seen])
        said: list[str] = []
        saves = {(each.step, each.save, each.ranks) for shares in seen for each in shares}
        for step, save, ranks in newest_first(saves):
            places = self._places(seen, save)
            holders = self._unharmed(mine, places, save, said)
            missing = [rank for rank in range(ranks) if not holders.get(rank)]
            if missing:
                said.append(
                    f"local step {step} is incomplete (missing: the share of rank {missing[0]}"
                    f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}): it is skipped"
                )
                continue
            try:
                return self._step(mine, holders, save), said
            except DamagedCheckpointError as error:  # the same on all ranks
                said.append(f"local step {step}: {error}: it is skipped")
        return None, said

    def _mine(self) -> dict[Seen, tuple[Path, ShareRecord]]:
        found: dict[Seen, tuple[Path, ShareRecord]] = {}
        for step, directory in self.store.shares():
            with suppress(CheckpointError):  # an unreadable share counts as missing: another machine may have it
                record = share.read(directory)
                at = share.rank_directory(self.store.root, record.rank)
                if record.header.line == self.line and directory == paths.step_directory(at, record.header.step):
                    found[Seen(step, record.save, record.rank, record.ranks)] = directory, record
        base = self.line.base or 0
        return {each: what for each, what in found.items() if each.step > base}

    def _places(self, seen: list[list[Seen]], save: str) -> dict[int, tuple[str, ...]]:
        """Maps each rank to the places with a copy of its share. A place is the id of a directory (`place_of`)."""
        found: dict[int, dict[str, None]] = {}
        for rank, shares in enumerate(seen):
            for each in shares:
                if each.save == save:
                    found.setdefault(each.rank, {})[self.store.places[rank]] = None
        return {rank: tuple(places) for rank, places in found.items()}

    def _unharmed(
        self,
        mine: Mapping[Seen, tuple[Path, ShareRecord]],
        places: Mapping[int, tuple[str, ...]],
        save: str,
        said: list[str],
    ) -> dict[int, tuple[str, ...]]:
        """Maps each rank to the places with an undamaged copy of its share. The ranks at a place split the hashing of
        the copies there."""
        verdicts = [
            Verdict(each.rank, self._place, share.damage(directory, record))
            for each, (directory, record) in mine.items()
            if self.check_hashes and each.save == save and self._is_mine(each.rank)
        ]
        bad = [each for part in all_gather_json(verdicts, self.world, list[Verdict]) for each in part if each.problem]
        said += [f"{each.problem}: that copy of the share of rank {each.rank} is not used" for each in bad]
        harmed = {(each.rank, each.place) for each in bad}
        return {rank: tuple(p for p in at if (rank, p) not in harmed) for rank, at in places.items()}

    @property
    def _place(self) -> str:
        return self.store.places[self.store.rank]

    def _is_mine(self, number: int) -> bool:
        """True if this rank hashes and reports this share for its place."""
        mates = self.store.mates
        return mates[number % len(mates)] == self.store.rank

    def _step(
        self, mine: Mapping[Seen, tuple[Path, ShareRecord]], holders: Mapping[int, tuple[str, ...]], save: str
    ) -> LocalStep:
        told = [
            record
            for each, (_, record) in mine.items()
            if each.save == save and holders[each.rank][0] == self._place and self._is_mine(each.rank)
        ]
        records = [each for part in all_gather_json(told, self.world, list[ShareRecord]) for each in part]
        records.sort(key=lambda record: record.rank)
        whole = self._joined(records)
        share_of = {file: record.rank for record in records for file in record.part.files}
        return LocalStep(self.store, self.world, whole, holders, share_of)

    @staticmethod
    def _joined(shares: list[ShareRecord]) -> manifest.Manifest:
        try:
            whole = join_notes(shares[0].header, [record.part for record in shares])
            manifest.check_numbers(whole)
            Positions(whole).check()
        except (AssertionError, KeyError, ValueError) as error:
            raise DamagedCheckpointError(f"its shares do not fit together ({error})") from error
        return whole

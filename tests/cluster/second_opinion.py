"""Checks NCCL's rules a second time, by another method than the prover: as a graph of what must happen before what.

Nothing is replayed. A point is a moment of a rank's host or device. All ranks end if the graph has no cycle and if
every joint operation is done by all its ranks. No code is shared with `megatron/prove/order/waits.py` and
`agreement.py`; docs/proofs.md has the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from megatron.prove.order.events import Mark, Op, Recording, Wait

Point = tuple[Any, ...]


def refusals(recordings: Mapping[int, Recording]) -> list[str]:
    """Lists what NCCL would reject, hang in or compute wrongly whatever the timing."""
    return [*_groups(recordings), *_meetings(recordings), *_results_not_waited_for(recordings)]


def hangs(
    recordings: Mapping[int, Recording], *, waits_block: bool, one_queue: bool, collectives_connect: bool = False
) -> bool:
    before = _Before(recordings, waits_block, one_queue, collectives_connect)
    try:
        TopologicalSorter(before.points).prepare()
    except CycleError:
        return True
    return before.somebody_is_missing


def _meeting_of(rank: int, op: Op, counts: dict[Point, int]) -> Iterator[tuple[Point, Any]]:
    """Meetings of an operation: (key that its sides share, what they must agree on)."""
    if not op.messages:
        counts[op.group] += 1
        yield (op.group, counts[op.group]), (op.kind, op.size, op.dtype, op.detail)
    for message in op.messages:
        way = (rank, message.peer) if message.side == "send" else (message.peer, rank)
        counts[op.group, way] += 1
        yield (op.group, way, counts[op.group, way]), (message.size, message.dtype, message.tag)


def _members(recordings: Mapping[int, Recording], rank: int, meeting: Point) -> set[int]:
    """Recorded ranks of a meeting."""
    ranks = meeting[1] if isinstance(meeting[1], tuple) else recordings[rank].groups[meeting[0]].ranks
    return set(ranks) & set(recordings)


def _groups(recordings: Mapping[int, Recording]) -> Iterator[str]:
    """Checks that all ranks make their n-th group in the same call."""
    made = {rank: list(recording.groups) for rank, recording in recordings.items()}
    for rank, recording in recordings.items():
        for place, (name, group) in enumerate(recording.groups.items()):
            for member in set(group.ranks) & set(recordings):
                if made[member][place : place + 1] != [name]:
                    yield f"group {place} of rank {rank} is another one on rank {member}"


def _meetings(recordings: Mapping[int, Recording]) -> Iterator[str]:
    said: dict[Point, dict[int, Any]] = defaultdict(dict)
    for rank, recording in recordings.items():
        counts: dict[Point, int] = defaultdict(int)
        for op in recording.ops:
            for meeting, content in _meeting_of(rank, op, counts):
                said[meeting][rank] = content
    for meeting, by_rank in said.items():
        if by_rank.keys() != _members(recordings, next(iter(by_rank)), meeting):
            yield f"{meeting}: not all are there"
        elif len(set(by_rank.values())) > 1:
            yield f"{meeting}: {by_rank}"


def _results_not_waited_for(recordings: Mapping[int, Recording]) -> Iterator[str]:
    for rank, recording in recordings.items():
        waited = {event.op for event in recording.events if isinstance(event, Wait)}
        for op in recording.ops:
            receives = not op.messages or any(message.side == "recv" for message in op.messages)
            if receives and op.number not in waited:
                yield f"rank {rank}: {op}"


class _Before:
    """`points` maps each point to those before it. A host point is passed; a device point starts or ends."""

    def __init__(
        self, recordings: Mapping[int, Recording], waits_block: bool, one_queue: bool, collectives_connect: bool
    ) -> None:
        self.recordings, self.waits_block, self.one_queue = recordings, waits_block, one_queue
        self.collectives_connect = collectives_connect
        self.points: dict[Point, set[Point]] = defaultdict(set)
        self.sides: dict[Point, set[int]] = defaultdict(set)
        self.arrivals: dict[Point, dict[int, Point]] = defaultdict(dict)
        for rank in recordings:
            self._rank(rank)
        self.somebody_is_missing = any(
            self.sides[meeting] != _members(recordings, next(iter(self.sides[meeting])), meeting)
            for meeting in list(self.sides)
        ) or any(
            by_rank.keys() != _members(recordings, next(iter(by_rank)), (*link, 0))
            for link, by_rank in self.arrivals.items()
        )
        for by_rank in self.arrivals.values():  # the first use of a link waits for all its ranks
            for here in by_rank.values():
                self.points[here] |= {self._before(other) for other in by_rank.values() if other != here}

    def _before(self, host: Point) -> Point:
        _, rank, number = host
        return ("host", rank, number - 1)

    def _rank(self, rank: int) -> None:
        recording = self.recordings[rank]
        counts: dict[Point, int] = defaultdict(int)
        ends: dict[int, list[Point]] = {}
        barriers: set[int] = set()
        last_of: dict[str, list[Point]] = defaultdict(list)
        """The end of the last work on each stream."""
        queue: list[Point] = []
        computation = last_of["computation"]
        events = [event for event in recording.events if not isinstance(event, Mark)]
        for number, event in enumerate(events):
            host: Point = ("host", rank, number)
            self.points[host].add(("host", rank, number - 1))
            start: Point = ("start", rank, number)
            after = {host, *queue}
            if isinstance(event, Op):
                after |= {*last_of[event.group], *computation}
                ends[event.number] = last_of[event.group] = self._operation(rank, event, counts, start, host)
                if event.kind == "barrier":
                    barriers.add(event.number)
            elif isinstance(event, Wait):
                after |= {*computation, *ends[event.op]}
                computation = [start]
                if self.waits_block or event.op in barriers:
                    self.points[host] |= set(ends[event.op])
            else:
                after |= set(computation)
                computation = [start]
            self.points[start] |= after
            if self.one_queue:
                queue = [start]

    def _operation(self, rank: int, op: Op, counts: dict[Point, int], start: Point, host: Point) -> list[Point]:
        ends: list[Point] = []
        for meeting, _ in _meeting_of(rank, op, counts):
            self.sides[meeting].add(rank)
            self.points["end", *meeting].add(start)
            ends.append(("end", *meeting))
            each = self.collectives_connect and not op.messages
            self.arrivals[meeting if each else meeting[:-1]].setdefault(rank, host)
        return ends

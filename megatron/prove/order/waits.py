"""Plays recordings of all ranks against each other under the rules of nccl and CUDA, until all have ended or all wait.

A rank is a host, which issues operations in its program's order, and a device. Each communicator's operations form a
stream, and so does the computation. A stream's entries run one after the other, and an operation also waits for the
computation issued before it. Streams pass entries through hardware queues, whose head blocks the entries behind it
until it can start. Each side of an operation starts on its own, and the operation ends when all have started.

A run that completes under the strictest rules also completes under weaker ones. docs/proofs.md cites the rules.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from megatron.prove.order.events import Communicator, Compute, Event, Mark, Op, Recording, Wait

_COMPUTE = "computation"
Key = tuple[object, ...]
"""Key that the sides of one operation have in common."""


@dataclass(frozen=True)
class Rules:
    """Rules about what blocks a host and a stream. The default is a GPU with a queue for every stream."""

    first_use_blocks: bool = True
    """True if the first operation of a communicator, and the first message of a pair of ranks, connect them: the host
    waits until the others issue theirs."""
    wait_blocks: bool = False
    """True if the host waits wherever the computation does: blocking waits, and results that are read."""
    collectives_connect: bool = False
    """True if every collective may connect: nccl makes the connections of an algorithm at its first use."""
    launch_blocks: bool = False
    """True if the host waits for the end of all it issues (`CUDA_LAUNCH_BLOCKING=1`)."""
    one_queue: bool = False
    """True if all streams share one hardware queue."""
    sharing: frozenset[str] = frozenset()
    """Axes whose communicators' streams share one queue; other streams have their own."""

    def queue_of(self, stream: str, axis: str) -> str:
        return "shared" if self.one_queue or axis in self.sharing else stream


INDEPENDENT = Rules()
ONE_QUEUE = Rules(one_queue=True)
"""Rules under `CUDA_DEVICE_MAX_CONNECTIONS=1`."""
LAUNCH_BLOCKS = Rules(launch_blocks=True)
STRICTEST = Rules(wait_blocks=True, one_queue=True, collectives_connect=True)


@dataclass
class Outcome:
    """Time in seconds at which all ranks ended, or the ranks that wait for each other forever."""

    seconds: float
    stuck: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Entry:
    """Operation, or a piece of computation, on one rank's device."""

    rank: int
    what: str
    stream: str
    queue: str
    issued: float
    seconds: float = 0.0
    keys: list[Key] = field(default_factory=list)
    after: "list[_Entry]" = field(default_factory=list)
    open: int = 0
    """Number of sides that have not met yet."""
    start: float | None = None
    end: float | None = None


class _World:
    def __init__(self, recordings: Mapping[int, Recording], rules: Rules, transfer: float) -> None:
        self.rules, self.transfer = rules, transfer
        self.ranks = {number: _Rank(self, recording) for number, recording in recordings.items()}
        self.met: dict[Key, list[_Entry]] = defaultdict(list)
        self.came: dict[Key, dict[int, float]] = defaultdict(dict)

    def run(self) -> Outcome:
        while sum(rank.advance() for rank in self.ranks.values()):
            pass
        ends = [entry.end or 0.0 for rank in self.ranks.values() for entry in rank.entries]
        return Outcome(max(ends, default=0.0), _ring(self))

    def meet(self, entry: _Entry, key: Key, sides: int) -> None:
        """Notes that `entry` has started its side of the operation `key`, and ends it when all sides have started."""
        there = self.met[key]
        there.append(entry)
        if len(there) < sides:
            return
        end = max(each.start or 0.0 for each in there) + self.transfer
        for each in there:
            each.open -= 1
            each.seconds = max(each.seconds, end - (each.start or 0.0))
            if each.open == 0:
                each.end = (each.start or 0.0) + each.seconds


class _Rank:
    def __init__(self, world: _World, recording: Recording) -> None:
        self.world, self.number, self.recording = world, recording.rank, recording
        self.events: list[Event] = [event for event in recording.events if not isinstance(event, Mark)]
        self.place, self.clock = 0, 0.0
        self.entries: list[_Entry] = []
        self.queues: dict[str, list[_Entry]] = defaultdict(list)
        self.heads: dict[str, int] = defaultdict(int)
        self.handed_over: dict[str, float] = defaultdict(float)
        self.last: dict[str, _Entry] = {}
        self.of_op: dict[int, _Entry] = {}
        self.counts: dict[Key, int] = defaultdict(int)
        self.connected: set[Key] = set()
        self.members: dict[Key, list[int]] = {}
        self.waiting_for: Callable[[], list[int]] = list
        self.waits_in = ""

    @property
    def ended(self) -> bool:
        return self.place == len(self.events) and all(entry.end is not None for entry in self.entries)

    def advance(self) -> bool:
        moved = False
        while self._start_entries() or self._issue():
            moved = True
        return moved

    # the host

    def _issue(self) -> bool:
        if self.place == len(self.events):
            return False
        if self.world.rules.launch_blocks and self.entries and self.entries[-1].end is None:
            last = self.entries[-1]
            self.waiting_for, self.waits_in = (lambda: self._who_holds(last)), f"waits for {last.what}"
            return False
        event = self.events[self.place]
        done = True
        if isinstance(event, Op):
            done = self._operation(event)
        elif isinstance(event, Wait):
            done = self._wait(event)
        elif isinstance(event, Compute):
            self._enqueue("computation", _COMPUTE, _COMPUTE, seconds=event.seconds)
        self.place += done
        return done

    def _operation(self, op: Op) -> bool:
        group = self.recording.groups[op.group]
        if self.world.rules.first_use_blocks and not self._connect(op, group):
            return False
        after = [self.last[_COMPUTE]] if _COMPUTE in self.last else []
        entry = self._enqueue(f"{op} on {group}", op.group, group.what or op.group, after=after)
        for key in _sides(self.number, op):
            self.counts[key] += 1
            entry.keys.append((*key, self.counts[key]))
        entry.open = len(entry.keys)
        self.of_op[op.number] = entry
        return True

    def _connect(self, op: Op, group: Communicator) -> bool:
        """Returns whether all ranks that the operation connects have arrived."""
        waiting: list[Key] = []
        for key in _sides(self.number, op):
            if self.world.rules.collectives_connect and op.is_collective:
                key = (*key, self.counts[key] + 1)
            if key in self.connected:
                continue
            came = self.world.came[key]
            came.setdefault(self.number, self.clock)
            if any(rank not in came for rank in self._members(key)):
                waiting.append(key)
            else:
                self.connected.add(key)
                self.clock = max(self.clock, *came.values())
        if not waiting:
            return True
        self.waiting_for = lambda: [
            rank for key in waiting for rank in self._members(key) if rank not in self.world.came[key]
        ]
        self.waits_in = f"connects for {op} on {group}"
        return False

    def _wait(self, event: Wait) -> bool:
        entry = self.of_op[event.op]
        if self.world.rules.wait_blocks or entry.what.startswith("barrier"):
            if entry.end is None:
                self.waiting_for, self.waits_in = (lambda: self._who_holds(entry)), f"waits for {entry.what}"
                return False
            self.clock = max(self.clock, entry.end)
        self._enqueue("computation", _COMPUTE, _COMPUTE, after=[entry])
        return True

    # the device

    def _enqueue(
        self, what: str, stream: str, axis: str, *, seconds: float = 0.0, after: Iterable[_Entry] = ()
    ) -> _Entry:
        entry = _Entry(self.number, what, stream, self.world.rules.queue_of(stream, axis), self.clock, seconds)
        entry.after = [*after, *([self.last[stream]] if stream in self.last else [])]
        self.last[stream] = entry
        self.queues[entry.queue].append(entry)
        self.entries.append(entry)
        return entry

    def _start_entries(self) -> bool:
        started = False
        for queue, entries in self.queues.items():
            while self.heads[queue] < len(entries):
                entry = entries[self.heads[queue]]
                ends = [each.end for each in entry.after]
                if any(end is None for end in ends):
                    break
                entry.start = max(entry.issued, self.handed_over[queue], *(end or 0.0 for end in ends), 0.0)
                self.handed_over[queue] = entry.start
                self.heads[queue] += 1
                started = True
                if not entry.keys:
                    entry.end = entry.start + entry.seconds
                for key in entry.keys:
                    self.world.meet(entry, key, len(self._members(key)))
        return started

    def _members(self, key: Key) -> list[int]:
        """Returns the recorded ranks that have a side of the operation `key`; cached for all operations of its kind."""
        group, kind = key[:2]
        key = key[:2] if kind == "all" else key[:4]
        if key not in self.members:
            ranks = self.recording.groups[str(group)].ranks if kind == "all" else key[2:]
            self.members[key] = [rank for rank in self.world.ranks if rank in ranks]
        return self.members[key]

    # the diagnosis

    def _who_holds(self, entry: _Entry) -> list[int]:
        """Returns the ranks that `entry` waits for: they have not started their side of `entry`, or of an entry that
        blocks it on this rank."""
        seen: set[int] = set()
        while entry.start is None and id(entry) not in seen:
            seen.add(id(entry))
            blocked = next((each for each in entry.after if each.end is None), None)
            if blocked is None:  # the head of the queue is blocked
                head = self.queues[entry.queue][self.heads[entry.queue]]
                blocked = next(each for each in head.after if each.end is None)
            entry = blocked
        for key in entry.keys:
            there = {each.rank for each in self.world.met[key]}
            if away := [rank for rank in self._members(key) if rank not in there]:
                return away
        return []

    def blocked(self) -> tuple[str, list[int]]:
        """Returns the operation that this rank waits in, and the ranks it waits for."""
        if self.place < len(self.events):
            return self.waits_in, self.waiting_for()
        entry = next(each for each in self.entries if each.end is None)
        return f"waits for {entry.what}", self._who_holds(entry)


def _sides(rank: int, op: Op) -> list[Key]:
    """Returns the parts of an operation that ranks must start together: a collective, or each of its messages."""
    if op.is_collective:
        return [(op.group, "all")]
    return [(op.group, "message", *each.way(rank)) for each in op.messages]


def _ring(world: _World) -> list[str]:
    """Describes the ring of ranks that wait for each other, or the chain of waiting ranks up to one that has ended: a
    line per rank."""
    rank = next((rank for rank in world.ranks.values() if not rank.ended), None)
    lines: dict[int, str] = {}
    while rank is not None and rank.number not in lines and not rank.ended:
        what, whom = rank.blocked()
        lines[rank.number] = f"rank {rank.number} {what}; missing: rank {', '.join(map(str, whom)) or '?'}"
        rank = world.ranks.get(whom[0]) if whom else None
    if rank is not None and rank.ended:
        lines[rank.number] = f"rank {rank.number} has ended"
    order = list(lines)
    first = order.index(rank.number) if rank is not None else 0
    return [lines[number] for number in (order if rank is None or rank.ended else order[first:])]


def play(recordings: Mapping[int, Recording], rules: Rules = STRICTEST, transfer: float = 0.0) -> Outcome:
    """Plays `recordings`, given by rank. If a communicator has more members, the recorded ones stand for all."""
    return _World(recordings, rules, transfer).run()

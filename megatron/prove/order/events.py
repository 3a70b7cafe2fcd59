"""What one rank asks of its communicators, in the order in which it asks; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MessageSide:
    """One side of a point-to-point message."""

    side: Literal["send", "recv"]
    peer: int
    """Rank in the world."""
    size: int
    dtype: str
    tag: int = 0

    def way(self, rank: int) -> tuple[int, int]:
        """(sender, receiver), where `rank` has this side."""
        return (rank, self.peer) if self.side == "send" else (self.peer, rank)

    def __str__(self) -> str:
        way = "send to" if self.side == "send" else "receive from"
        return f"{way} rank {self.peer}, {self.size} x {self.dtype}, tag {self.tag}"


@dataclass(frozen=True)
class Op:
    """A collective, a send, a receive, or several of these in one batch."""

    number: int
    """Among all operations of the rank."""
    group: str
    kind: str
    size: int = 0
    """Elements of this rank's input; -1 where it depends on data."""
    dtype: str = ""
    detail: str = ""
    """The reduction, the root."""
    messages: tuple[MessageSide, ...] = ()
    given: int = field(default=0, compare=False)
    """Elements of this rank's input, also where their number depends on data."""

    @property
    def is_collective(self) -> bool:
        return not self.messages

    def __str__(self) -> str:
        if self.messages:
            return " and ".join(map(str, self.messages))
        size = "a size that depends on data" if self.size < 0 else str(self.size)
        return " ".join(filter(None, [self.kind, self.detail and f"({self.detail})", f"of {size} x {self.dtype}"]))


@dataclass(frozen=True)
class Wait:
    """The computation from here on uses the operation's result."""

    op: int


@dataclass(frozen=True)
class Compute:
    """Work on the device between communications; `seconds` counts only where time is simulated."""

    seconds: float


@dataclass(frozen=True)
class Mark:
    """The name of what follows: a step, an evaluation, a save."""

    name: str


Event = Op | Wait | Compute | Mark


@dataclass(frozen=True)
class Communicator:
    name: str
    """Equal on all members if they made their groups in the same order."""
    ranks: tuple[int, ...]
    what: str = ""
    """Its axis."""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:4])) + (f", ... {self.ranks[-1]}" if len(self.ranks) > 4 else "")
        return f"{self.what or 'group'} {self.name[:6]} (ranks {shown})"


@dataclass(frozen=True)
class Recording:
    """All that one rank did."""

    rank: int
    groups: dict[str, Communicator] = field(default_factory=dict)
    """By name, in the order in which they were made."""
    events: Sequence[Event] = ()

    @property
    def ops(self) -> list[Op]:
        return [event for event in self.events if isinstance(event, Op)]

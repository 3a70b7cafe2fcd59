"""Operations that one rank issues on its communicators, in order. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MessageSide:
    """One side of a point-to-point message."""

    side: Literal["send", "recv"]
    peer: int
    """Global rank of the other side."""
    size: int
    dtype: str
    tag: int = 0

    def way(self, rank: int) -> tuple[int, int]:
        """Returns (sender, receiver) if `rank` has this side."""
        return (rank, self.peer) if self.side == "send" else (self.peer, rank)

    def __str__(self) -> str:
        way = "send to" if self.side == "send" else "receive from"
        return f"{way} rank {self.peer}, {self.size} x {self.dtype}, tag {self.tag}"


@dataclass(frozen=True)
class Op:
    """Collective, send, receive, or several of these in one batch."""

    number: int
    """Number among all operations of the rank."""
    group: str
    kind: str
    size: int = 0
    """Elements of this rank's input; -1 if they depend on data."""
    dtype: str = ""
    detail: str = ""
    """Reduction or root of a collective."""
    messages: tuple[MessageSide, ...] = ()
    given: int = field(default=0, compare=False)
    """Elements of this rank's input, even if they depend on data."""

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
    """Point from which the computation uses the operation's result."""

    op: int


@dataclass(frozen=True)
class Compute:
    """Work on the device between communications; `seconds` counts only where time is simulated."""

    seconds: float


@dataclass(frozen=True)
class Mark:
    """Name of the events that follow: a step, an evaluation, a save."""

    name: str


Event = Op | Wait | Compute | Mark


@dataclass(frozen=True)
class Communicator:
    name: str
    """Name, equal on all members if they made their groups in the same order."""
    ranks: tuple[int, ...]
    what: str = ""
    """Axis of the layout."""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:4])) + (f", ... {self.ranks[-1]}" if len(self.ranks) > 4 else "")
        return f"{self.what or 'group'} {self.name[:6]} (ranks {shown})"


@dataclass(frozen=True)
class Recording:
    """Groups and events of one rank."""

    rank: int
    groups: dict[str, Communicator] = field(default_factory=dict)
    """Communicators by name, in the order in which they were made."""
    events: Sequence[Event] = ()

    @property
    def ops(self) -> list[Op]:
        return [event for event in self.events if isinstance(event, Op)]

"""What ranks tell of themselves, and what follows from it: who is gone, and who waits for whom. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.distributed.operations import Operation

State = Literal["alive", "left", "failed"]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One rank at one moment."""

    rank: int
    number: int
    host: str
    pid: int
    pids: str
    """The namespace that `pid` counts in."""
    step: int
    phase: str
    state: State = "alive"
    text: str = ""
    """The error of a rank that failed."""
    still: float = 0.0
    """Seconds since it last began or ended an operation."""
    waiting: Operation | None = None
    last: Operation | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    recent: Mapping[str, Sequence[Operation]] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Beat:
        values: dict[str, Any] = json.loads(text)
        for name in ("waiting", "last"):
            values[name] = None if values[name] is None else _operation(values[name])
        values["recent"] = {axis: [_operation(one) for one in some] for axis, some in values["recent"].items()}
        return Beat(**values)

    def __str__(self) -> str:
        phase = f", {self.phase}" if self.phase else ""
        return f"step {self.step}{phase}, {self.doing}"

    @property
    def doing(self) -> str:
        if self.waiting is not None:
            return f"in {self.waiting}"
        return f"after {self.last}" if self.last is not None else "before the first collective"

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def _operation(values: dict[str, Any]) -> Operation:
    shape = values["shape"]
    return Operation(**{**values, "ranks": tuple(values["ranks"]), "shape": None if shape is None else tuple(shape)})


def process_state(beat: Beat, host: str, pids: str) -> str | None:
    """The letter that the kernel has for the process: "" where there is none any more, None where it cannot be seen
    from here (another machine, another container)."""
    if beat.host != host or beat.pids != pids or not pids:
        return None
    try:
        text = Path(f"/proc/{beat.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]


def verdict(beat: Beat, silent: float, process: str | None, patience: float) -> str | None:
    """How a rank was lost; None while it may be well. A process that runs is slow at most, however silent: something
    may keep its threads from running, and --distributed-timeout-minutes bounds that."""
    if beat.state == "left":
        return None
    if beat.state == "failed":
        return f"ended with an error of its own ({beat.text})" if silent > patience / 2 else None
    if process in ("", "Z", "X"):
        return "ended without a word (killed, out of memory, or aborted by gloo after a collective that was left out)"
    if silent <= patience:
        return None
    if process in ("T", "t"):
        return f"is stopped (SIGSTOP, or a debugger) for {silent:.0f} s"
    return f"has not been heard of for {silent:.0f} s" if process is None else None


def out_of_step(beats: Sequence[Beat]) -> str | None:
    """Two ranks that made different calls as the same collective of one axis."""
    made: dict[tuple[str, tuple[int, ...], int], tuple[Beat, Operation]] = {}
    for beat in beats:
        for operations in beat.recent.values():
            for operation in operations:
                key = (operation.axis, operation.ranks, operation.number)
                other, theirs = made.setdefault(key, (beat, operation))
                if (theirs.name, theirs.shape) != (operation.name, operation.shape):
                    return (
                        f"rank {other.rank} and rank {beat.rank} are out of step: the same collective is {theirs} for "
                        f"rank {other.rank} ({other}) and {operation} for rank {beat.rank} ({beat}); one of them left "
                        "a collective out or made one too many"
                    )
    return None


def waiting_in_a_circle(beats: Sequence[Beat], world: int, patience: float) -> str | None:
    """All ranks wait, for long, and none of them for a collective that all its members have begun: nobody can go on."""
    stuck = [beat for beat in beats if beat.state == "alive" and beat.waiting is not None and beat.still > patience]
    if len(stuck) < len(beats) or len(beats) < world:
        return None
    by_rank = {beat.rank: beat for beat in beats}
    first: tuple[Beat, Operation, Beat] | None = None
    for beat in stuck:
        operation = beat.waiting
        assert operation is not None
        if not operation.number:
            continue  # a message: that its sender waits too shows that it was not sent
        behind = [by_rank[r] for r in operation.ranks if by_rank[r].counts.get(operation.axis, 0) < operation.number]
        if not behind:
            return None  # all have begun it, so it is under way
        first = first or (beat, operation, behind[0])
    if first is None:
        listed = "; ".join(f"rank {beat.rank}: {beat}" for beat in stuck[:4])
        return f"all ranks wait for each other for {patience:.0f} s: {listed}"
    beat, operation, behind_it = first
    return (
        f"all ranks wait for each other for {patience:.0f} s: rank {beat.rank} in {operation} ({beat}), which rank "
        f"{behind_it.rank} has not begun ({behind_it}); one of them left a collective out or made one too many"
    )

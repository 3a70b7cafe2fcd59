"""Detects lost ranks, mismatched collectives and deadlocks from the status that ranks publish. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.distributed.comm_log import CommOp

State = Literal["alive", "left", "failed"]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What one rank publishes with each heartbeat."""

    rank: int
    number: int
    host: str
    pid: int
    pid_namespace: str
    """The PID namespace of `pid`."""
    step: int
    phase: str
    state: State = "alive"
    text: str = ""
    """The error of a failed rank."""
    idle: float = 0.0
    """Seconds since it last started or ended a communication."""
    waiting: CommOp | None = None
    last: CommOp | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    recent: Mapping[str, Sequence[CommOp]] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> RankStatus:
        values: dict[str, Any] = json.loads(text)
        for name in ("waiting", "last"):
            values[name] = None if values[name] is None else _operation(values[name])
        values["recent"] = {axis: [_operation(one) for one in some] for axis, some in values["recent"].items()}
        return RankStatus(**values)

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


def _operation(values: dict[str, Any]) -> CommOp:
    shape = values["shape"]
    return CommOp(**{**values, "ranks": tuple(values["ranks"]), "shape": None if shape is None else tuple(shape)})


def process_state(status: RankStatus, host: str, pid_namespace: str) -> str | None:
    """The process's state letter in /proc; "" if it has ended, None if it is not visible from here (another machine or
    container)."""
    if status.host != host or status.pid_namespace != pid_namespace or not pid_namespace:
        return None
    try:
        text = Path(f"/proc/{status.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]


def why_lost(status: RankStatus, silent: float, process: str | None, patience: float) -> str | None:
    """Why a rank counts as lost; None while it may be alive. A running process without heartbeats is only slow (its
    threads may be starved), which --distributed-timeout-minutes bounds."""
    if status.state == "left":
        return None
    if status.state == "failed":
        return f"ended with an error of its own ({status.text})" if silent > patience / 2 else None
    if process in ("", "Z", "X"):
        return "ended without a word (killed, out of memory, or aborted by gloo after a collective that was left out)"
    if silent <= patience:
        return None
    if process in ("T", "t"):
        return f"is stopped (SIGSTOP, or a debugger) for {silent:.0f} s"
    return f"has not been heard of for {silent:.0f} s" if process is None else None


def mismatched_collectives(statuses: Sequence[RankStatus]) -> str | None:
    """Names two ranks that called different operations as the same collective of an axis."""
    made: dict[tuple[str, tuple[int, ...], int], tuple[RankStatus, CommOp]] = {}
    for status in statuses:
        for operations in status.recent.values():
            for operation in operations:
                key = (operation.axis, operation.ranks, operation.number)
                other, theirs = made.setdefault(key, (status, operation))
                if (theirs.name, theirs.shape) != (operation.name, operation.shape):
                    return (
                        f"rank {other.rank} and rank {status.rank} are out of step: the same collective is {theirs} "
                        f"for rank {other.rank} ({other}) and {operation} for rank {status.rank} ({status}); one of "
                        "them left a collective out or made one too many"
                    )
    return None


def deadlock(statuses: Sequence[RankStatus], world: int, patience: float) -> str | None:
    """Describes a deadlock: all ranks have waited longer than `patience`, and none of them for a collective that all of
    its members have started."""
    stuck = [
        status
        for status in statuses
        if status.state == "alive" and status.waiting is not None and status.idle > patience
    ]
    if len(stuck) < len(statuses) or len(statuses) < world:
        return None
    by_rank = {status.rank: status for status in statuses}
    first: tuple[RankStatus, CommOp, RankStatus] | None = None
    for status in stuck:
        operation = status.waiting
        assert operation is not None
        if not operation.number:
            continue  # a point-to-point message: its sender waits too, so it was not sent
        behind = [by_rank[r] for r in operation.ranks if by_rank[r].counts.get(operation.axis, 0) < operation.number]
        if not behind:
            return None  # all have started it, so it is in flight
        first = first or (status, operation, behind[0])
    if first is None:
        listed = "; ".join(f"rank {status.rank}: {status}" for status in stuck[:4])
        return f"all ranks wait for each other for {patience:.0f} s: {listed}"
    status, operation, behind_it = first
    return (
        f"all ranks wait for each other for {patience:.0f} s: rank {status.rank} in {operation} ({status}), which rank "
        f"{behind_it.rank} has not begun ({behind_it}); one of them left a collective out or made one too many"
    )

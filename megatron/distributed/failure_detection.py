"""Detects lost ranks, mismatched collectives and deadlocks from published statuses. All functions are pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron.distributed.comm_log import CommOp
from megatron.utils import process

State = Literal["alive", "left", "failed", "announced"]
"""State of a rank. An `announced` rank has announced a failure to all ranks, and prints it."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status that a rank publishes with each heartbeat."""

    rank: int
    number: int
    host: str
    pid: int
    pid_namespace: str
    """PID namespace of `pid`."""
    step: int
    phase: str
    state: State = "alive"
    text: str = ""
    """Error of a failed rank."""
    idle: float = 0.0
    """Seconds since this rank last started or ended a communication."""
    waiting: CommOp | None = None
    timed_out: CommOp | None = None
    """Operation that did not end within --distributed-timeout-minutes."""
    last: CommOp | None = None
    explains: bool = False
    """True if a collective of this rank has failed, and the rank looks for the cause."""
    counts: Mapping[str, int] = field(default_factory=dict)
    recent: Mapping[str, Sequence[CommOp]] = field(default_factory=dict)

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


def visible_process_state(status: RankStatus, host: str, pid_namespace: str) -> str | None:
    """State letter of the process in /proc; "" if it has ended, None if it is not visible from here (another machine or
    container)."""
    if status.host != host or status.pid_namespace != pid_namespace or not pid_namespace:
        return None
    return process.process_state(status.pid)


def why_lost(status: RankStatus, silent: float, process: str | None, patience: float) -> str | None:
    """Reason why a rank counts as lost; None while it may be alive. A running process without heartbeats counts as
    slow, not as lost: its threads may wait for cores. --distributed-timeout-minutes limits that time."""
    if status.state == "left":
        return None
    if status.state == "failed":
        return f"ended with an error ({status.text})" if silent > patience / 2 else None
    if process in ("", "Z", "X"):
        return "ended without an error message (killed, out of memory, or aborted by gloo after a missing collective)"
    if silent <= patience:
        return None
    if process in ("T", "t"):
        return f"is stopped (SIGSTOP, or a debugger) for {silent:.0f} s"
    return f"has sent no heartbeat for {silent:.0f} s" if process is None else None


def mismatched_collectives(statuses: Sequence[RankStatus]) -> str | None:
    """Names two ranks that called different operations as the same collective of an axis."""
    made: dict[tuple[str, int, int], tuple[RankStatus, CommOp]] = {}
    for status in statuses:
        for operations in status.recent.values():
            for operation in operations:
                key = (operation.axis, operation.ranks[0], operation.number)  # the groups of an axis are disjoint
                other, theirs = made.setdefault(key, (status, operation))
                if (theirs.name, theirs.shape) != (operation.name, operation.shape):
                    return (
                        f"rank {other.rank} and rank {status.rank} are out of step: one collective is {theirs} "
                        f"for rank {other.rank} ({other}) and {operation} for rank {status.rank} ({status}); one of "
                        "them skipped or added a collective"
                    )
    return None


def stuck_rank(statuses: Sequence[RankStatus]) -> str | None:
    """Names a rank that is alive and has not begun a collective in which another rank has timed out."""
    if any(status.state == "failed" for status in statuses):
        return None  # the failed rank is the cause
    for status in statuses:
        operation = status.timed_out
        members = [] if operation is None else [other for other in statuses if other.rank in operation.ranks]
        behind = [other for other in members if other.timed_out is None and other.state == "alive"]
        if operation is not None and operation.number:
            behind = [other for other in behind if other.counts.get(operation.axis, 0) < operation.number]
        behind.sort(key=lambda other: other.waiting is not None)  # a waiting rank is not the stuck one
        if behind:
            return (
                f"{behind[0].name} is alive and stuck ({behind[0]}): rank {status.rank} has waited for it until the "
                f"timeout in {operation} ({status})"
            )
    return None


def deadlock(statuses: Sequence[RankStatus], world: int, patience: float) -> str | None:
    """Describes a deadlock: all unfinished ranks have waited longer than `patience`, and none of them waits for a
    collective that all its members have started. A rank that waits for its device may just be computing; its status
    must therefore have `recent`."""
    stuck = [
        status
        for status in statuses
        if status.state == "alive" and status.waiting is not None and status.idle > patience
    ]
    left = sum(status.state == "left" for status in statuses)
    if not stuck or len(stuck) + left < len(statuses) or len(statuses) < world:
        return None
    if any(status.waiting is not None and status.waiting.on_device for status in stuck):
        return _uneven(statuses, patience)
    by_rank = {status.rank: status for status in statuses}
    waits: dict[tuple[str, int, int], RankStatus] = {}  # one of the ranks that wait for the same collective
    for status in stuck:
        assert status.waiting is not None
        waits.setdefault((status.waiting.axis, status.waiting.ranks[0], status.waiting.number), status)
    first: tuple[RankStatus, CommOp, RankStatus] | None = None
    for status in waits.values():
        operation = status.waiting
        assert operation is not None
        if not operation.number:
            continue  # a point-to-point message that was not sent, because its sender waits too
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
        f"{behind_it.rank} has not begun ({behind_it}); one of them skipped or added a collective"
    )


def _uneven(statuses: Sequence[RankStatus], patience: float) -> str | None:
    """Names two ranks with different numbers of begun collectives. A host that launches work on a device continues
    after beginning a collective, so only the counts reveal a skipped collective; in a long step they are equal."""
    by_rank = {status.rank: status for status in statuses}
    for status in statuses:
        for axis, some in status.recent.items():
            other = by_rank[some[-1].ranks[0]]
            mine, theirs = status.counts.get(axis, 0), other.counts.get(axis, 0)
            if mine != theirs:
                return (
                    f"all ranks wait for {patience:.0f} s, and rank {status.rank} has begun {mine} collectives over "
                    f"{axis} ({status}), rank {other.rank} {theirs} ({other}); one of them skipped or added a "
                    "collective"
                )
    return None

"""Parsers of the values that ranks exchange through the rendezvous store.

Any program that reaches the store's port can write there. Each kind of value has one parser, which takes bytes and
returns either a valid value or an `Unreadable` with the reason. No value makes a parser raise an exception. The store
itself limits a value to 8 MiB and cannot return its length beforehand; each parser has a smaller limit.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NoReturn, TypeVar, get_args

from megatron.distributed.comm_log import CommOp
from megatron.distributed.failure_detection import RankStatus, State

QUOTED = 200
"""Number of characters of an invalid value that a message repeats."""
ANNOUNCEMENT_BYTES = 8 << 10
_STATUS_BYTES, _LARGE_BYTES = 256 << 10, 4 << 20
_TEXT_CHARACTERS = 1000
_MOST = 2**63 - 1
_OPERATIONS = ("waiting", "timed_out", "last")
_SENT = tuple(name for name in RankStatus.__dataclass_fields__ if name != "recent")

ErrorKind = Literal["hang", "lost", "terminated"]
_KINDS = "|".join(get_args(ErrorKind))
_ANNOUNCEMENT = re.compile(rf"(0|[1-9][0-9]{{0,7}}) ({_KINDS}) (.*)", re.DOTALL)
_IDENTITY = re.compile(rb"[0-9a-f]{64} [0-9]{1,8}")

Value = TypeVar("Value")


@dataclass(frozen=True)
class Unreadable:
    """Value that no rank of this run has written."""

    raw: bytes
    reason: str

    def __str__(self) -> str:
        return f'"{printable_start(self.raw, QUOTED)}" ({self.reason})'


@dataclass(frozen=True)
class Announcement:
    """Failure that ends the run, and the rank that found it."""

    rank: int
    kind: ErrorKind
    text: str


@dataclass(frozen=True)
class FirstRank:
    """Compared values of the first rank that arrived at a meeting."""

    rank: int
    host: str
    values: dict[str, str]
    shown: dict[str, str]


class _WrongError(Exception):
    """Reason why a value is unreadable."""


def printable_start(text: str | bytes, most: int = _TEXT_CHARACTERS) -> str:
    """Beginning of the text, without characters that move a terminal's cursor or change its state."""
    start = text[: 4 * most].decode(errors="replace") if isinstance(text, bytes) else text[:most]
    return "".join(one if one.isprintable() else "?" for one in start[:most])


# ---- statuses


def encode_status(status: RankStatus) -> str:
    """Encodes the status as JSON, without `recent`, which is large and rarely needed."""
    values = {name: getattr(status, name) for name in _SENT}
    for name in _OPERATIONS:
        values[name] = None if values[name] is None else _plain(values[name])
    return json.dumps(values)


def parse_status(raw: bytes, rank: int, world: int) -> RankStatus | Unreadable:
    """Parses the status that this rank has published."""

    def read() -> RankStatus:
        found = _fields(_json(raw, _STATUS_BYTES))
        if found.keys() != set(_SENT):
            raise _WrongError("not the fields of a status")
        return RankStatus(
            rank=_integer(found["rank"], rank, rank),
            number=_integer(found["number"]),
            host=_text(found["host"]),
            pid=_integer(found["pid"], 1, 2**31 - 1),
            pid_namespace=_text(found["pid_namespace"]),
            step=_integer(found["step"]),
            phase=_text(found["phase"]),
            state=_state(found["state"]),
            text=_text(found["text"]),
            idle=_seconds(found["idle"]),
            explains=_flag(found["explains"]),
            counts={printable_start(axis): _integer(count) for axis, count in _fields(found["counts"]).items()},
            waiting=_operation_if_any(found["waiting"], world),
            timed_out=_operation_if_any(found["timed_out"], world),
            last=_operation_if_any(found["last"], world),
        )

    return _attempt(raw, read)


def encode_recent(recent: Mapping[str, Sequence[CommOp]]) -> str:
    return json.dumps({axis: [_plain(one) for one in some] for axis, some in recent.items()})


def parse_recent(raw: bytes, world: int) -> dict[str, list[CommOp]] | Unreadable:
    """Parses the last operations of a rank, by axis; at least one per axis."""

    def read() -> dict[str, list[CommOp]]:
        found = _fields(_json(raw, _LARGE_BYTES))
        return {printable_start(axis): [_operation(one, world) for one in _list(some)] for axis, some in found.items()}

    return _attempt(raw, read)


def _plain(operation: CommOp) -> list[Any]:
    """Encodes an operation. Most groups have ranks at one stride, so a world of 8192 ranks takes three numbers."""
    ranks = operation.ranks
    steps = {ranks.step} if isinstance(ranks, range) else {after - before for before, after in pairwise(ranks)}
    even = [ranks[0], ranks[-1] + 1, steps.pop() if steps else 1] if len(steps) <= 1 else []
    members = even or [-1, *ranks]
    return [operation.name, operation.axis, members, operation.number, operation.shape, operation.on_device]


def _operation_if_any(value: object, world: int) -> CommOp | None:
    return None if value is None else _operation(value, world)


def _operation(value: object, world: int) -> CommOp:
    found = _list(value)
    if len(found) != 6:
        raise _WrongError("not an operation")
    name, axis, members, number, shape, on_device = found
    return CommOp(
        _text(name),
        _text(axis),
        _ranks(_list(members), world),
        _integer(number),
        None if shape is None else tuple(_integer(size) for size in _list(shape, least=0)),
        _flag(on_device),
    )


def _ranks(members: list[object], world: int) -> Sequence[int]:
    if members[0] == -1:
        return tuple(_integer(one, 0, world - 1) for one in _list(members[1:]))
    if len(members) != 3:
        raise _WrongError("not a group of ranks")
    start = _integer(members[0], 0, world - 1)
    return range(start, _integer(members[1], start + 1, world), _integer(members[2], 1))


# ---- announcements and meetings


def encode_announcement(found: Announcement) -> bytes:
    text = f"{found.rank} {found.kind} {found.text}".encode(errors="replace")
    return text[:ANNOUNCEMENT_BYTES].decode(errors="ignore").encode()


def parse_announcement(raw: bytes, world: int) -> Announcement | Unreadable:
    def read() -> Announcement:
        match = _ANNOUNCEMENT.fullmatch(_decoded(raw, ANNOUNCEMENT_BYTES))
        if match is None:
            raise _WrongError("not an announcement")
        kind = next(kind for kind in get_args(ErrorKind) if kind == match[2])
        return Announcement(_integer(int(match[1]), 0, world - 1), kind, printable_start(match[3], ANNOUNCEMENT_BYTES))

    return _attempt(raw, read)


def parse_identity(raw: bytes) -> str | Unreadable:
    """Parses the digest of the values of the first rank that arrived."""
    return raw[:64].decode() if _IDENTITY.fullmatch(raw) else Unreadable(raw, "not a digest and a rank")


def parse_first_rank(raw: bytes) -> FirstRank | Unreadable:
    def read() -> FirstRank:
        found = _list(_json(raw, _LARGE_BYTES))
        if len(found) != 4:
            raise _WrongError("not the values of a rank")
        values, shown = (
            {printable_start(name): _text(one) for name, one in _fields(some).items()} for some in (found[2], found[3])
        )
        return FirstRank(_integer(found[0]), _text(found[1]), values, shown)

    return _attempt(raw, read)


def parse_ranks(raw: bytes, world: int) -> set[int]:
    """Parses a list to which each rank appends its number; other words are ignored."""
    words = raw[:_LARGE_BYTES].split()
    return {int(word) for word in words if word.isdigit() and len(word) < 9} & set(range(world))


# ---- JSON from unknown programs


def _attempt(raw: bytes, read: Callable[[], Value]) -> Value | Unreadable:
    try:
        return read()
    except _WrongError as wrong:
        return Unreadable(raw, str(wrong))


def _decoded(raw: bytes, most: int) -> str:
    if len(raw) > most:
        raise _WrongError(f"{len(raw)} bytes, {most} at most")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _WrongError("not UTF-8") from None


def _json(raw: bytes, most: int) -> object:
    text = _decoded(raw, most)
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _WrongError("not JSON") from None


def _no_constant(name: str) -> NoReturn:
    raise _WrongError(f"{name} is not a number")


def _fields(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongError("not an object")
    return value


def _list(value: object, least: int = 1) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        raise _WrongError(f"not a list of at least {least}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _WrongError("not a text")
    return printable_start(value)


def _integer(value: object, least: int = 0, most: int = _MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _WrongError(f"not a whole number from {least} to {most}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _WrongError("not true or false")
    return value


def _seconds(value: object) -> float:
    # Compared, not converted: an integer may be too large for a float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_MOST <= value <= _MOST:
        raise _WrongError("not a number of seconds")
    return max(0.0, float(value))


def _state(value: object) -> State:
    for state in get_args(State):
        if value == state:
            return state
    raise _WrongError("not a state")

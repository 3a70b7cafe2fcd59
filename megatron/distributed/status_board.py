"""Exchanges the ranks' heartbeats through keys of the store.

The store answers one request at a time, some 30 microseconds each, so a rank's requests must not grow with the number
of ranks. Any call of `read` makes two requests; only the rank in charge reads many statuses.
"""

import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron.distributed.comm_log import CommLog
from megatron.distributed.failure_detection import RankStatus
from megatron.distributed.store_values import (
    Announcement,
    Unreadable,
    encode_announcement,
    encode_recent,
    encode_status,
    parse_ranks,
    parse_recent,
    parse_status,
)
from megatron.utils.log import print_line

_WAITS_FOR_A_KEY = timedelta(seconds=1)  # for a key that another program deletes after the store has reported it
_ANNOUNCED, _ASKED, _FAILED = "announced", "asked", "failed"
_Value = TypeVar("_Value")


class StatusBoard:
    def __init__(self, store: dist.Store, world: int, now: Callable[[], float] = time.monotonic) -> None:
        store.set_timeout(_WAITS_FOR_A_KEY)
        self._store, self._world, self._now = store, world, now
        self._warned = False
        self.answered = now()
        """Time of the store's last answer."""
        self.seen: dict[int, RankStatus] = {}
        """Last status read of each rank."""
        self._recent_of = -math.inf  # `moved` of the last published operations
        self._news: dict[int, float] = {}  # rank -> time at which a changed heartbeat was last read

    def publish(self, status: RankStatus) -> None:
        self._store.set(_key(status.rank), encode_status(status))
        self.answered = self._now()

    def publish_recent(self, rank: int, comm_log: CommLog) -> None:
        """Publishes the rank's latest operations, if there are new ones."""
        if comm_log.moved != self._recent_of:
            self._recent_of = comm_log.moved
            recent = {axis: list(some) for axis, some in comm_log.recent.items()}
            self._store.set(_recent_key(rank), encode_recent(recent))

    def with_recent(self, statuses: Sequence[RankStatus]) -> list[RankStatus]:
        keys = self._present([_recent_key(status.rank) for status in statuses])
        texts = dict(zip(keys, self._store.multi_get(keys))) if keys else {}
        recent = {key: self._ours(key, parse_recent(raw, self._world)) for key, raw in texts.items()}
        return [replace(status, recent=recent.get(_recent_key(status.rank)) or {}) for status in statuses]

    def read(self, ranks: Sequence[int]) -> list[RankStatus]:
        """Returns the last known statuses of these ranks, without ranks that have published none. An absent or invalid
        value keeps the previous status, so that the rank counts as silent."""
        present = self._present([_key(rank) for rank in ranks])
        texts = dict(zip(present, self._store.multi_get(present))) if present else {}
        self.answered = self._now()
        found: list[RankStatus] = []
        for rank in ranks:
            before, raw = self.seen.get(rank), texts.get(_key(rank))
            status = None if raw is None else self._ours(_key(rank), parse_status(raw, rank, self._world))
            status = status or before
            if status is None:
                continue
            found.append(status)
            if before is None or before.number != status.number:
                self._news[status.rank] = self._now()
            self.seen[status.rank] = status
        return found

    def _present(self, keys: Sequence[str]) -> list[str]:
        """Returns the keys that the store has. Reading an absent key would block."""
        if not keys or self._store.check(list(keys)):
            return list(keys)
        return [key for key in keys if self._store.check([key])]

    def silent(self, rank: int) -> float:
        """Seconds since a new status of this rank was last read."""
        return self._now() - self._news[rank]

    def _ours(self, key: str, value: _Value | Unreadable) -> _Value | None:
        """Returns the value if a rank of this run can have written it. Warns about the first one that is invalid."""
        if not isinstance(value, Unreadable):
            return value
        if not self._warned:
            self._warned = True
            print_line(
                f"warning: the ranks' store holds {value} under {key}, which no rank of this run writes; ignored. "
                "Allow only the machines of this run to reach the store's port",
                sys.stderr,
            )
        return None

    def announce(self, failure: Announcement) -> bytes:
        """Announces the end of the run to all ranks. Returns the first announcement, which may be another rank's."""
        return bytes(self._store.compare_set(_ANNOUNCED, "", encode_announcement(failure).decode()))

    def announcement(self) -> bytes | None:
        found = bytes(self._store.get(_ANNOUNCED)) if self._store.check([_ANNOUNCED]) else None
        self.answered = self._now()
        return found

    def ask(self) -> None:
        """Asks the rank in charge to check all ranks. A random value is used, because the store drops the connection of
        a client that increments a value that is not a number."""
        self._store.set(_ASKED, secrets.token_hex(8))

    def asked(self) -> bytes | None:
        """Value of the last request; it differs for each request."""
        return bytes(self._store.get(_ASKED)) if self._store.check([_ASKED]) else None

    def tell_failure(self, rank: int) -> None:
        """Records that this rank has failed with an error, which it prints."""
        self._store.set(_FAILED, str(rank))

    def someone_failed(self) -> bool:
        """True if a rank has recorded its failure and its status agrees."""
        if not self._store.check([_FAILED]):
            return False
        ranks = parse_ranks(bytes(self._store.get(_FAILED)), self._world)
        return any(status.state == "failed" for status in self.read(sorted(ranks)))


def _key(rank: int) -> str:
    return f"rank_{rank}"


def _recent_key(rank: int) -> str:
    return f"recent_{rank}"

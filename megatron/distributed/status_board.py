"""The store's keys through which the heartbeats of ranks talk.

The store answers one request after the other, some 30 microseconds each, so a rank's requests must not grow with the
number of ranks. `read` takes the same two requests for any number; only the rank in charge reads many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from megatron.distributed.comm_log import CommLog
from megatron.distributed.failure_detection import RankStatus, decode_recent, encode_recent

_ANNOUNCED, _ASKED, _FAILED = "announced", "asked", "failed"


class StatusBoard:
    def __init__(self, store: dist.Store, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._now = store, now
        self.answered = now()
        """When the store last answered."""
        self.seen: dict[int, RankStatus] = {}
        """The last status that was read of each rank."""
        self._recent_of = -math.inf  # the moment of the last operations that were published
        self._news: dict[int, float] = {}  # rank -> when its last heartbeat that differed from the one before was read

    def publish(self, status: RankStatus) -> None:
        self._store.set(_key(status.rank), status.encode())
        self.answered = self._now()

    def publish_recent(self, rank: int, comm_log: CommLog) -> None:
        """Publishes the rank's latest operations, if there are new ones."""
        if comm_log.moved != self._recent_of:
            self._recent_of = comm_log.moved
            recent = {axis: list(some) for axis, some in comm_log.recent.items()}
            self._store.set(_recent_key(rank), encode_recent(recent))

    def with_recent(self, statuses: Sequence[RankStatus]) -> list[RankStatus]:
        keys = [_recent_key(status.rank) for status in statuses]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        texts = dict(zip(keys, self._store.multi_get(keys))) if keys else {}
        recent = {key: decode_recent(text.decode()) for key, text in texts.items()}
        return [replace(status, recent=recent.get(_recent_key(status.rank), {})) for status in statuses]

    def read(self, ranks: Sequence[int]) -> list[RankStatus]:
        """The statuses of these ranks, as far as they have published one."""
        unknown = [rank for rank in ranks if rank not in self.seen]
        there = set(ranks)
        if unknown and not self._store.check([_key(rank) for rank in unknown]):
            there -= {rank for rank in unknown if not self._store.check([_key(rank)])}
        present = sorted(there)
        texts = self._store.multi_get([_key(rank) for rank in present]) if present else []
        self.answered = self._now()
        found = [RankStatus.decode(text.decode()) for text in texts]
        for status in found:
            before = self.seen.get(status.rank)
            if before is None or before.number != status.number:
                self._news[status.rank] = self._now()
            self.seen[status.rank] = status
        return found

    def silent(self, rank: int) -> float:
        """Seconds since a new status of this rank was last read."""
        return self._now() - self._news[rank]

    def announce(self, text: str) -> str:
        """Announces the end of the run to all ranks. Returns the announcement that came first, which may be another
        rank's."""
        return self._store.compare_set(_ANNOUNCED, "", text).decode()

    def announcement(self) -> str | None:
        found = self._store.get(_ANNOUNCED).decode() if self._store.check([_ANNOUNCED]) else None
        self.answered = self._now()
        return found

    def ask(self) -> None:
        """Asks the rank in charge to look at all ranks."""
        self._store.add(_ASKED, 1)

    def times_asked(self) -> int:
        return int(self._store.add(_ASKED, 0))

    def tell_failure(self) -> None:
        """Notes that a rank has failed with an error of its own, which it prints."""
        self._store.set(_FAILED, "")

    def someone_failed(self) -> bool:
        return bool(self._store.check([_FAILED]))


def _key(rank: int) -> str:
    return f"rank_{rank}"


def _recent_key(rank: int) -> str:
    return f"recent_{rank}"

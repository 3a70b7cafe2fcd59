"""Heartbeats of many ranks in one thread, with a store that counts its requests and a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron.distributed.comm_log import CommLog
from megatron.distributed.heartbeat import Heartbeat
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.status_board import StatusBoard
from megatron.errors import MegatronError

PATIENCE = 20.0
LIMIT = 100.0  # seconds of a collective


class CountedStore:
    """A store with torch's interface; counts the requests of its client and the keys that they handle."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests = self.keys = 0

    def _count(self, requests: int, keys: int = 1) -> None:
        self.requests += requests
        self.keys += keys

    def set(self, key: str, value: str | bytes) -> None:
        self._count(1)
        self.values[key] = value.encode() if isinstance(value, str) else value

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing: no call waits here."""

    def check(self, keys: Sequence[str]) -> bool:
        self._count(1, len(keys))
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._count(1, len(keys))
        if not all(key in self.values for key in keys):
            raise dist.DistStoreError("timed out")

    def add(self, key: str, amount: int) -> int:
        self._count(1)
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            raise dist.DistNetworkError("the store has closed the connection") from None
        self.values[key] = str(total).encode()
        return total

    def append(self, key: str, value: str) -> None:
        self._count(1)
        self.values[key] = self.values.get(key, b"") + value.encode()

    def get(self, key: str) -> bytes:
        self._count(2)  # it waits for the key first
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._count(2, 2 * len(keys))
        return [self.values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count(1)
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values[key]


class Ended(Exception):
    """Raised instead of ending the process."""


class Cluster:
    """All ranks of a run in one thread, with a simulated clock."""

    def __init__(self, world: int, on_each_machine: int = 8) -> None:
        self.on_each_machine = on_each_machine
        self.time, self.store = 0.0, CountedStore()
        self.ended: list[tuple[int, MegatronError, bool]] = []
        self.logs = [CommLog(moved=0.0) for _ in range(world)]
        self.beating = set(range(world))
        self.ranks = [self._rank(number, world) for number in range(world)]
        for rank in self.ranks:
            rank.connect()
        self.board = StatusBoard(self.store, world, lambda: self.time)  # type: ignore[arg-type]
        self.interval = self.ranks[0]._interval

    def _rank(self, number: int, world: int) -> Heartbeat:
        def end(error: MegatronError, prints: bool) -> None:
            self.ended.append((number, error, prints))
            raise Ended

        each = self.on_each_machine
        info = LaunchInfo(
            rank=number, world_size=world, local_rank=number % each, local_world_size=each, agent_store=True, run_id="x"
        )
        heartbeat = Heartbeat(
            info,
            self.logs[number],
            lambda: (7, "forward-backward"),
            end,
            patience=PATIENCE,
            limit=LIMIT,
            connect=lambda: self.store,  # type: ignore[arg-type, return-value]
            now=lambda: self.time,
        )
        heartbeat._host = f"machine {number // each}"
        return heartbeat

    def wait(self, ranks: Sequence[int], axis: str = "dp") -> None:
        """Makes these ranks wait in that collective from now on."""
        world = range(len(self.ranks))
        for rank in ranks:
            log = self.logs[rank]
            log.counts = {"dp": 8}
            log.waiting = log.began("all_reduce", axis, world, (4,))
            log.moved = self.time

    def pass_time(self, seconds: float) -> Iterator[int]:
        """Yields the store's requests in each interval."""
        for _ in range(int(seconds / self.interval)):
            self.time += self.interval
            before = self.store.requests
            for number in sorted(self.beating):
                try:
                    self.ranks[number].beat()
                    self.ranks[number].look()
                    if self.ranks[number]._in_charge == number:
                        self.ranks[number].answer(self.board)
                except Ended:
                    self.beating.discard(number)
            yield self.store.requests - before

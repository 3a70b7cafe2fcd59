"""Heartbeats: when a rank dies, is stopped or gets out of step, it is named and all ranks end.

Once a second each rank publishes its step, its phase and what it waits for in the launcher's store, and checks the next
rank; a failure is announced to all ranks. This runs in threads of its own, because the training thread may hang in a
collective. A rank that is merely slow is left alone: --distributed-timeout-minutes bounds that.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron.distributed.comm_log import CommLog
from megatron.distributed.failure_detection import (
    RankStatus,
    State,
    deadlock,
    mismatched_collectives,
    process_state,
    why_lost,
)
from megatron.distributed.launch import LaunchInfo
from megatron.errors import HangError, MegatronError, PeerLostError, TerminatedError

_INTERVAL = 1.0
_LOCK_HELD_AT_MOST = 4.0  # seconds that a signal waits for the store; a look at the ranks takes milliseconds
_ERRORS: dict[str, type[MegatronError]] = {"hang": HangError, "lost": PeerLostError, "terminated": TerminatedError}
"""By the first word of an announcement."""
_WAY_OUT = "Start again with --load to go on from the last checkpoint"

Where = Callable[[], tuple[int, str]]
"""Returns the step and the phase that this rank is in."""
OnEnd = Callable[[MegatronError, bool], None]
"""Ends this process because of the error; the flag says whether this rank is the one to print it."""


class Heartbeat:
    """Publishes this rank's status and checks the others, from `start()` to `leave()` or `fail()`."""

    def __init__(self, info: LaunchInfo, comm_log: CommLog, where: Where, on_end: OnEnd, *, patience: float) -> None:
        self._info, self._comm_log, self._where, self._on_end = info, comm_log, where, on_end
        self._patience = patience
        self._number = 0
        self._host, self._pid_namespace = socket.gethostname(), _own_pid_namespace()
        self._store_answered = time.monotonic()
        self._last_seen: dict[int, tuple[int, float]] = {}  # rank -> (number of its last heartbeat, when that was seen)
        self._statuses: dict[int, RankStatus] = {}
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._store_lock = threading.Lock()

    def start(self) -> None:
        info = self._info
        # A connection of its own: a request of the training thread may block for minutes.
        store = dist.TCPStore(
            info.store_host, info.master_port, None, False, timedelta(seconds=self._patience), wait_for_workers=False
        )
        self._store = dist.PrefixStore(f"heartbeat/{info.run_id}/attempt_{info.attempt}", store)
        self._publish("alive")
        if not info.agent_store:  # rank 0 hosts the store: its status is needed if the store stops answering
            self._store.wait(["rank_0"], timedelta(minutes=5))
            self._read(0)
        for work in (self._run, self._watch_store):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def leave(self) -> None:
        """This rank has finished its work."""
        self._close("left", "")

    def fail(self, text: str) -> None:
        """This rank ends with an error of its own, which it prints itself."""
        self._close("failed", text)
        self._keep_store_alive()

    def explain(self) -> None:
        """Called after a failed collective: ends the process with the cause if one is found. Returns if another rank
        reported an error of its own, or if no cause is found in time."""
        deadline = time.monotonic() + self._patience + 3 * _INTERVAL
        while time.monotonic() < deadline and not any(status.state == "failed" for status in self._statuses.values()):
            with self._store_lock, suppress(RuntimeError):
                self._read_announcement()
                self._check_all()
            time.sleep(0.2)

    def asked_to_end(self) -> None:
        """Called on SIGTERM; ends the process. The launcher sends it when a rank of this machine has died, which is
        then the cause."""
        if self._store_lock.acquire(timeout=_LOCK_HELD_AT_MOST):
            with suppress(RuntimeError):
                self._read_announcement()
                first = self._info.rank - self._info.local_rank
                for rank in range(first, first + self._info.local_world_size):
                    status = self._read(rank) if rank != self._info.rank else None
                    if status is not None:
                        self._check(status)
                self._announce(f"terminated {by_sigterm(self._where())}")
        self._end(f"terminated {by_sigterm(self._where())}", prints=True)  # the store does not answer

    # ---- this rank

    def _close(self, state: State, text: str) -> None:
        self._closed.set()
        if not self._store_lock.acquire(timeout=2.0):
            return  # the store does not answer
        try:
            with suppress(RuntimeError):  # its host may have ended already
                self._publish(state, text)
        finally:
            self._store_lock.release()

    def _publish(self, state: State, text: str = "") -> None:
        self._number += 1
        comm_log, (step, phase) = self._comm_log, self._where()
        status = RankStatus(
            rank=self._info.rank,
            number=self._number,
            host=self._host,
            pid=os.getpid(),
            pid_namespace=self._pid_namespace,
            step=step,
            phase=phase,
            state=state,
            text=text[:300],
            idle=time.monotonic() - comm_log.moved,
            waiting=comm_log.waiting,
            last=comm_log.last,
            counts=dict(comm_log.counts),
        )
        if status.idle > 2 * _INTERVAL:  # only needed to diagnose a hang
            status = replace(status, recent={axis: list(some) for axis, some in comm_log.recent.items()})
        self._store.set(f"rank_{self._info.rank}", status.encode())
        self._store_answered = time.monotonic()

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL):
            with self._store_lock, suppress(RuntimeError):  # no answer: the other thread measures for how long
                if self._closed.is_set():
                    return
                self._publish("alive")
                self._read_announcement()
                self._check_next_rank()
                if time.monotonic() - self._comm_log.moved > self._patience and self._comm_log.waiting:
                    self._check_all()

    # ---- the other ranks

    def _check_next_rank(self) -> None:
        """Checks the next rank that has not finished, so that every rank is checked by exactly one other."""
        world, rank = self._info.world_size, self._info.rank
        if not self._info.agent_store:
            self._read(0)  # keep its status current
        for offset in range(1, world):
            status = self._read((rank + offset) % world)
            if status is None:
                return  # it is still starting
            if status.state != "left":
                self._check(status)
                return

    def _check_all(self) -> None:
        found = [self._read(rank) for rank in range(self._info.world_size)]
        statuses = [status for status in found if status is not None]
        for status in statuses:
            if status.rank != self._info.rank:
                self._check(status)
        hang = mismatched_collectives(statuses) or deadlock(statuses, self._info.world_size, self._patience)
        if hang is not None:
            self._announce(f"hang {hang}")

    def _check(self, status: RankStatus) -> None:
        silent = time.monotonic() - self._last_seen[status.rank][1]
        process = process_state(status, self._host, self._pid_namespace)
        found = why_lost(status, silent, process, self._patience)
        if found is None:
            return
        status = self._read(status.rank) or status  # it may have finished in between
        if status.state == "alive" or why_lost(status, silent, process, self._patience):
            self._announce(f"lost {status.name} {found}; it was last seen in {status}{self._own_place()}")

    def _read(self, rank: int) -> RankStatus | None:
        key = f"rank_{rank}"
        if not self._store.check([key]):
            return None
        status = RankStatus.decode(self._store.get(key).decode())
        self._store_answered = time.monotonic()
        self._statuses[rank] = status
        if self._last_seen.get(rank, (-1, 0.0))[0] != status.number:
            self._last_seen[rank] = (status.number, time.monotonic())
        return status

    # ---- ending the run

    def _announce(self, text: str) -> None:
        """Announces a failure to all ranks. The first rank to announce one is the one that prints it."""
        mine = f"{self._info.rank} {text}"
        announced = self._store.compare_set("announced", "", mine).decode()
        self._end(announced.partition(" ")[2], prints=announced == mine)

    def _own_place(self) -> str:
        """Where this rank is now, for messages; another rank's status may be a second old."""
        step, phase = self._where()
        waiting = self._comm_log.waiting or self._comm_log.last
        return f"; rank {self._info.rank} is at step {step}{f', {phase}' if phase else ''}, {waiting or 'starting'}"

    def _read_announcement(self) -> None:
        if self._store.check(["announced"]):
            self._end(self._store.get("announced").decode().partition(" ")[2], prints=False)

    def _end(self, announced: str, *, prints: bool) -> NoReturn:
        kind, _, text = announced.partition(" ")
        error = _ERRORS[kind](text if kind == "terminated" else f"{text}. {_WAY_OUT}")
        with self._ending:  # never released: the first thread ends the process
            self._on_end(error, prints)
            self._keep_store_alive()
            os._exit(error.exit_code)

    def _keep_store_alive(self) -> None:
        """Where rank 0 hosts the store, it lives on for a moment, because the store ends with it."""
        if self._info.rank == 0 and not self._info.agent_store:
            time.sleep(3 * _INTERVAL)

    def _watch_store(self) -> None:
        """Without the store no rank can announce anything: each one judges the store's host, and prints its verdict."""
        while not self._closed.wait(_INTERVAL):
            silent = time.monotonic() - self._store_answered
            if silent <= 3 * _INTERVAL:
                continue
            host = self._statuses.get(0)
            if self._info.agent_store or host is None:
                found, where = (None, "") if silent <= self._patience else ("does not answer", "")
                name = f"the launcher's store at {self._info.master_addr}:{self._info.master_port}"
            else:
                found = why_lost(host, silent, process_state(host, self._host, self._pid_namespace), self._patience)
                name, where = f"{host.name}", f"; it was last seen in {host}{self._own_place()}"
            if found is not None:
                self._end(f"lost {name} {found}{where}", prints=True)


def by_sigterm(where: tuple[int, str]) -> str:
    """The message of a run that SIGTERM ends, given its step and phase."""
    step, phase = where
    return (
        f"ended by SIGTERM at step {step}{f' ({phase})' if phase else ''}; start again with --load to go on from the "
        "last checkpoint. --exit-signal-handler saves first"
    )


def _own_pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no such file system here
        return ""

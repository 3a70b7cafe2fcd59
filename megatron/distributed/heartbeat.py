"""Heartbeats: if a rank dies, is stopped or gets out of step, a message names it and all ranks end.

Once a second, each rank publishes its step, its phase and its current wait in the launcher's store, and checks the next
rank. (Above 1024 ranks it does so less often, to keep the store's load constant.) A rank that has waited for long asks
the rank in charge to check all ranks. A failure is announced to all ranks. Separate threads do this, because the
training thread may hang in a collective. A rank that is only slow is not ended: --distributed-timeout-minutes limits
its time.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron.distributed.comm_log import CommLog, CommOp
from megatron.distributed.failure_detection import (
    RankStatus,
    State,
    deadlock,
    mismatched_collectives,
    stuck_rank,
    visible_process_state,
    why_lost,
)
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.status_board import StatusBoard
from megatron.distributed.store_values import (
    Announcement,
    ErrorKind,
    Unreadable,
    encode_announcement,
    parse_announcement,
)
from megatron.errors import HangError, MegatronError, PeerLostError, TerminatedError

_INTERVAL = 1.0
_BEATS_PER_SECOND = 1024  # of all ranks together
_LOCK_HELD_AT_MOST = 4.0  # seconds that a signal waits for the store; a check of the ranks takes milliseconds
_SEEN_TO_PRINT_WITHIN = 3.0  # seconds after an announcement; less than `_LOCK_HELD_AT_MOST`
_ERRORS: dict[ErrorKind, type[MegatronError]] = {
    "hang": HangError,
    "lost": PeerLostError,
    "terminated": TerminatedError,
}
_WAY_ON = "start the same command again"  # default of `way_on`, when no step was made

Where = Callable[[], tuple[int, str]]
"""Returns the step and the phase that this rank is in."""
OnEnd = Callable[[MegatronError, bool], None]
"""Ends this process because of the error; the flag is True if this rank prints it."""


class Heartbeat:
    """Publishes this rank's status and checks the others, from `start()` to `leave()` or `fail()`."""

    def __init__(
        self,
        info: LaunchInfo,
        comm_log: CommLog,
        where: Where,
        on_end: OnEnd,
        *,
        patience: float,
        limit: float = math.inf,
        keys: str = "heartbeat",
        connect: Callable[[], dist.Store] | None = None,
        now: Callable[[], float] = time.monotonic,
        way_on: Callable[[bool], str] = lambda interrupted: _WAY_ON,
    ) -> None:
        self._info, self._comm_log, self._where, self._on_end = info, comm_log, where, on_end
        self._interval = _interval(info.world_size)
        self._patience = max(patience, 3 * self._interval)
        self._limit = (
            limit  # longest time of a collective, in seconds, if the host waits for its device and no call times out
        )
        self._keys = keys  # prefix in the store
        self._connect, self._now, self._way_on = connect or self._own_connection, now, way_on
        self._number = 0
        self._host, self._pid_namespace = socket.gethostname(), _own_pid_namespace()
        self._next = (info.rank + 1) % info.world_size  # the first one after this rank that has not finished
        self._in_charge = 0
        """Rank that checks all others on request: the first one that has not finished and is not silent."""
        self._answered: bytes | None = None  # the last request that this rank has answered
        self._last_asked = -math.inf
        self._explains = False
        self._announced: bytes | None = None  # announcement of this rank, if no other rank announced before
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._store_lock = threading.Lock()

    def start(self) -> None:
        self.connect()
        self._comm_log.watched = True
        for work in (self._run, self._watch_store, self._answer):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def connect(self) -> None:
        """Connects to the store and publishes the first status."""
        # A separate connection: a request of the training thread may block for minutes.
        store = self._connect()
        self._board = StatusBoard(store, self._info.world_size, self._now)
        self._publish("alive")
        if not self._info.agent_store:  # rank 0 hosts the store: its status is needed if the store does not answer
            store.wait(["rank_0"], timedelta(minutes=5))
        self._board.read([0])

    def _own_connection(self) -> dist.Store:
        info = self._info
        store = dist.TCPStore(
            info.store_host, info.master_port, None, False, timedelta(seconds=self._patience), wait_for_workers=False
        )
        return dist.PrefixStore(f"{self._keys}/{info.run_id}/attempt_{info.attempt}", store)

    def leave(self) -> None:
        """Publishes that this rank has finished its work."""
        self._close("left", "")

    def fail(self, text: str) -> None:
        """Publishes that this rank ends with an error, which it prints itself."""
        self._close("failed", text)
        self._keep_store_alive()

    def explain(self) -> None:
        """Looks for the cause of a failed collective, and ends the process with it. Returns if another rank reported an
        error of its own, or if no cause is found in time."""
        self._explains = True
        deadline = self._now() + self._patience + 3 * self._interval
        while self._now() < deadline:
            with self._store_lock, suppress(RuntimeError):
                if self._board.someone_failed():
                    return
                self._board.ask()
                self.look()
            time.sleep(self._interval)

    def asked_to_end(self) -> None:
        """Ends the process on SIGTERM. The launcher sends it when a rank of this machine has died; the message then
        names this cause."""
        if self._store_lock.acquire(timeout=_LOCK_HELD_AT_MOST):
            with suppress(RuntimeError):
                self._read_announcement()
                others = [rank for rank in self._info.ranks_here if rank != self._info.rank]
                for status in self._board.read(others):
                    self._check(self._board, status)
                self._announce("terminated", by_sigterm(self._where(), self._way_on(True)))
        self._end("terminated", by_sigterm(self._where(), self._way_on(True)), prints=True)  # the store does not answer

    # ---- this rank

    def _close(self, state: State, text: str) -> None:
        self._closed.set()
        if not self._store_lock.acquire(timeout=2.0):
            return  # the store does not answer
        try:
            with suppress(RuntimeError):  # the store's host may have ended already
                self._publish(state, text)
                if state == "failed":
                    self._board.tell_failure(self._info.rank)
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
            state=state if self._announced is None else "announced",
            text=text[:300],
            idle=self._now() - comm_log.moved,
            waiting=comm_log.waiting,
            timed_out=comm_log.timed_out or self._overdue(),
            last=comm_log.last,
            explains=self._explains,
            counts=dict(comm_log.counts),
        )
        self._board.publish(status)
        if status.idle > 2 * _INTERVAL:  # only needed to diagnose a hang
            self._board.publish_recent(status.rank, comm_log)

    def _overdue(self) -> CommOp | None:
        """Last collective of this rank, if its device has been busy for longer than a collective may take."""
        waiting = self._comm_log.waiting
        overdue = waiting is not None and waiting.on_device and self._now() - self._comm_log.moved > self._limit
        return self._comm_log.last if overdue else None

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            with self._store_lock, suppress(RuntimeError):  # `_watch_store` handles a silent store
                if self._closed.is_set():
                    return
                self.beat()
                self.look()

    def beat(self) -> None:
        self._publish("alive")

    # ---- the other ranks

    def look(self) -> None:
        """Reads the announcement and two statuses: of the next rank, so that each is checked by its predecessor, and of
        the rank in charge. A rank that waits for long asks the rank in charge to read all statuses."""
        self._read_announcement()
        for status in self._board.read(sorted({self._next, self._in_charge} - {self._info.rank})):
            # A final state counts only if it stays: the rank's next beat replaces a status that another program wrote.
            stays = self._board.silent(status.rank) > 2 * self._interval
            if status.rank == self._next and status.state == "left" and stays:
                self._next = (self._next + 1) % self._info.world_size
            if status.rank == self._in_charge and (
                (status.state != "alive" and stays) or self._board.silent(status.rank) > self._patience
            ):
                self._in_charge += 1
            self._check(self._board, status)
        waits = self._comm_log.waiting is not None and self._now() - self._comm_log.moved > self._patience
        if waits and self._now() - self._last_asked > self._patience:
            self._last_asked = self._now()
            self._board.ask()

    def _answer(self) -> None:
        """Answers requests, in its own thread and with its own connection to the store: reading thousands of statuses
        must not delay the heartbeats."""
        board: StatusBoard | None = None
        while not self._closed.wait(self._interval):
            if self._in_charge == self._info.rank:
                with suppress(RuntimeError):
                    board = board or StatusBoard(self._connect(), self._info.world_size, self._now)
                    self.answer(board)

    def answer(self, board: StatusBoard) -> None:
        """Reads all statuses and looks for a hang, if a rank has requested this since the last call."""
        asked = board.asked()
        if asked == self._answered:
            return
        statuses = board.read(range(self._info.world_size))
        self._answered = asked
        for status in statuses:
            if status.rank != self._info.rank:
                self._check(board, status)
        hang = deadlock(statuses, self._info.world_size, self._patience) or stuck_rank(statuses)
        on_device = any(status.waiting is not None and status.waiting.on_device for status in statuses)
        if hang is not None or on_device or any(status.explains for status in statuses):
            statuses = board.with_recent(statuses)
            hang = mismatched_collectives(statuses) or hang  # more specific than a deadlock
            hang = hang or deadlock(statuses, self._info.world_size, self._patience)
        if hang is not None:
            self._announce("hang", hang)

    def _check(self, board: StatusBoard, status: RankStatus) -> None:
        silent = board.silent(status.rank)
        process = visible_process_state(status, self._host, self._pid_namespace)
        if why_lost(status, silent, process, self._patience) is None:
            return
        (status,) = board.read([status.rank])  # it may have finished in between
        found = why_lost(status, board.silent(status.rank), process, self._patience)
        if found is not None:
            self._announce("lost", f"{status.name} {found}; it was last seen in {status}{self._own_place()}")

    # ---- ending the run

    def _announce(self, kind: ErrorKind, text: str) -> None:
        """Announces a failure to all ranks. The first rank to announce one prints it."""
        mine = Announcement(self._info.rank, kind, text)
        self._announced = encode_announcement(mine)  # set first: another thread of this rank may read it at once
        first = self._board.announce(mine)
        if first != self._announced:
            self._end_by(first)
        with suppress(RuntimeError):
            self._publish("announced")
        self._end(kind, text, prints=True)

    def _end_by(self, announced: bytes) -> NoReturn:
        """Ends this process because of an announcement. Usually only the announcing rank prints it.

        Another program may have written the announcement in the name of a rank. Therefore the rank that it names prints
        it too, and so does the first rank of each machine unless the status of the named rank confirms it.
        """
        found = parse_announcement(announced, self._info.world_size)
        if announced == self._announced:
            assert isinstance(found, Announcement)
            self._end(found.kind, found.text, prints=True)
        named = isinstance(found, Announcement) and found.rank == self._info.rank
        if named:
            with suppress(RuntimeError):
                self._publish("announced")  # the others then leave the message to this rank
        if named or (self._info.local_rank == 0 and not self._seen_to_print(found)):
            quoted = found if isinstance(found, Unreadable) else Unreadable(announced, "a valid announcement")
            who = (
                f"rank {found.rank} has not printed it" if isinstance(found, Announcement) else "no rank has written it"
            )
            text = (
                f"an announcement in the ranks' store ends the run, but {who}: {quoted}; if no rank has failed, "
                "another program writes there: allow only the machines of this run to reach the store's port"
            )
            self._end("lost" if isinstance(found, Unreadable) else found.kind, text, prints=True)
        if isinstance(found, Unreadable):
            self._end("lost", f"an announcement in the ranks' store ended the run: {found}", prints=False)
        self._end(found.kind, found.text, prints=False)

    def _seen_to_print(self, found: Announcement | Unreadable) -> bool:
        """True if the announcing rank's status confirms the announcement, so that this rank will print it."""
        if isinstance(found, Unreadable):
            return False
        pause = 0.1
        for _ in range(round(_SEEN_TO_PRINT_WITHIN / pause)):
            with suppress(RuntimeError):  # the store of that rank may have ended
                if any(status.state == "announced" for status in self._board.read([found.rank])):
                    return True
            time.sleep(pause)
        return False

    def _own_place(self) -> str:
        """Current step, phase and operation of this rank, for messages; another rank's status may be a second old."""
        step, phase = self._where()
        waiting = self._comm_log.waiting or self._comm_log.last
        return f"; rank {self._info.rank} is at step {step}{f', {phase}' if phase else ''}, {waiting or 'starting'}"

    def _read_announcement(self) -> None:
        if (found := self._board.announcement()) is not None:
            self._end_by(found)

    def _end(self, kind: ErrorKind, text: str, *, prints: bool) -> NoReturn:
        error = _ERRORS[kind](text if kind == "terminated" else f"{text}; {self._way_on(False)}")
        with self._ending:  # never released: the first thread ends the process
            self._on_end(error, prints)
            self._keep_store_alive()
            os._exit(error.exit_code)

    def _keep_store_alive(self) -> None:
        """Delays the exit of rank 0 if it hosts the store, because the store ends with it."""
        if self._info.rank == 0 and not self._info.agent_store:
            time.sleep(3 * _INTERVAL)

    def _watch_store(self) -> None:
        """Ends this rank if the store's host is lost. Without the store, every rank prints its own error."""
        while not self._closed.wait(_INTERVAL):
            silent = self._now() - self._board.answered
            if silent <= 3 * self._interval:
                continue
            host = self._board.seen.get(0)
            if self._info.agent_store or host is None:
                found, where = (None, "") if silent <= self._patience else ("does not answer", "")
                name = f"the launcher's store at {self._info.master_addr}:{self._info.master_port}"
            else:
                found = why_lost(
                    host, silent, visible_process_state(host, self._host, self._pid_namespace), self._patience
                )
                name, where = f"{host.name}", f"; it was last seen in {host}{self._own_place()}"
            if found is not None:
                self._end("lost", f"{name} {found}{where}", prints=True)


def _interval(world_size: int) -> float:
    return max(_INTERVAL, world_size / _BEATS_PER_SECOND)


def by_sigterm(where: tuple[int, str], way_on: str) -> str:
    """Error message for SIGTERM, given the step and phase, and how the run can continue."""
    step, phase = where
    return f"ended by SIGTERM at step {step}{f' ({phase})' if phase else ''}; {way_on}"


def _own_pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # the system has no /proc
        return ""

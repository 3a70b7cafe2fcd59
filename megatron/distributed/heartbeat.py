"""A heartbeat outside the collectives: a rank that dies, stops or gets out of step is named, and the others end.

Each rank tells once a second, through the launcher's store, its step, its phase and what it waits for, and looks after
the next rank; what it finds it tells all. The threads need nothing of the thread that trains, which may hang in a
collective. A rank that is slow and beats is left alone: --distributed-timeout-minutes bounds it.
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

import torch.distributed as dist

from megatron.distributed.beats import Beat, State, out_of_step, process_state, verdict, waiting_in_a_circle
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.operations import Operations
from megatron.errors import HangError, MegatronError, PeerLostError

_EVERY = 1.0
_WAY_OUT = "Start again with --load to go on from the last checkpoint"

Where = Callable[[], tuple[int, str]]
"""The step and the phase that this rank is in."""
OnEnd = Callable[[MegatronError, bool], None]
"""What a rank does about it, and does not return from; the flag: whether this rank is the one to say it."""


class Heartbeat:
    """Beats from `start()` to `leave()` or `fail()`."""

    def __init__(
        self, info: LaunchInfo, operations: Operations, where: Where, on_end: OnEnd, *, patience: float
    ) -> None:
        self._info, self._operations, self._where, self._on_end = info, operations, where, on_end
        self._patience = patience
        self._number = 0
        self._host, self._pids = socket.gethostname(), _namespace()
        self._answered = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> (its last number, when that came)
        self._known: dict[int, Beat] = {}
        self._closed, self._ended = threading.Event(), threading.Lock()
        self._using = threading.Lock()

    def start(self) -> None:
        info = self._info
        # A connection of its own: what the training thread asks of the store may wait for minutes.
        store = dist.TCPStore(
            info.master_addr, info.master_port, None, False, timedelta(seconds=self._patience), wait_for_workers=False
        )
        self._store = dist.PrefixStore(f"heartbeat/{info.run_id}/attempt_{info.attempt}", store)
        self._tell("alive")
        if not info.agent_store:  # rank 0 keeps the store, and is to be known when that does not answer
            self._store.wait(["rank_0"], timedelta(minutes=5))
            self._read(0)
        for work in (self._run, self._watch_the_store):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def leave(self) -> None:
        """This rank has done its work; nobody shall miss it."""
        self._close("left", "")

    def fail(self, text: str) -> None:
        """This rank ends with an error of its own, which it says itself."""
        self._close("failed", text)
        self._let_others_read()

    def explain(self) -> None:
        """A collective failed: ends the process with the cause if one is found; returns if a rank has an error of its
        own to say, or nothing is found for a while."""
        deadline = time.monotonic() + self._patience + 3 * _EVERY
        while time.monotonic() < deadline and not any(beat.state == "failed" for beat in self._known.values()):
            with self._using, suppress(RuntimeError):
                self._look_for_the_announcement()
                self._judge_all(self._everybody())
            time.sleep(0.2)

    def asked_to_end(self) -> None:
        """By the launcher, perhaps because a rank of this machine is gone: then ends the process with that."""
        if self._using.acquire(timeout=1.0):
            with suppress(RuntimeError):
                self._look_for_the_announcement()
                first = self._info.rank - self._info.local_rank
                for rank in range(first, first + self._info.local_world_size):
                    beat = self._read(rank) if rank != self._info.rank else None
                    if beat is not None:
                        self._judge(beat)
            self._using.release()
        self.fail("ended by SIGTERM")

    # this rank

    def _close(self, state: State, text: str) -> None:
        self._closed.set()
        if not self._using.acquire(timeout=2.0):
            return  # the store does not answer
        try:
            with suppress(RuntimeError):  # its host may have gone before
                self._tell(state, text)
        finally:
            self._using.release()

    def _tell(self, state: State, text: str = "") -> None:
        self._number += 1
        operations, (step, phase) = self._operations, self._where()
        beat = Beat(
            rank=self._info.rank,
            number=self._number,
            host=self._host,
            pid=os.getpid(),
            pids=self._pids,
            step=step,
            phase=phase,
            state=state,
            text=text[:300],
            still=time.monotonic() - operations.moved,
            waiting=operations.waiting,
            last=operations.last,
            counts=dict(operations.counts),
        )
        if beat.still > 2 * _EVERY:  # needed only where something hangs
            beat = replace(beat, recent={axis: list(some) for axis, some in operations.recent.items()})
        self._store.set(f"rank_{self._info.rank}", beat.encode())
        self._answered = time.monotonic()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY):
            with self._using, suppress(RuntimeError):  # no answer: the other thread counts the seconds
                if self._closed.is_set():
                    return
                self._tell("alive")
                self._look_for_the_announcement()
                self._look_after_the_next()
                if time.monotonic() - self._operations.moved > self._patience and self._operations.waiting:
                    self._judge_all(self._everybody())

    # the others

    def _look_after_the_next(self) -> None:
        """The next rank that has not left: each rank is looked after by one, however many there are."""
        world, rank = self._info.world_size, self._info.rank
        if not self._info.agent_store:
            self._read(0)  # what is known of it must be fresh
        for offset in range(1, world):
            beat = self._read((rank + offset) % world)
            if beat is None:
                return  # it is only starting
            if beat.state != "left":
                self._judge(beat)
                return

    def _judge_all(self, beats: list[Beat]) -> None:
        for beat in beats:
            if beat.rank != self._info.rank:
                self._judge(beat)
        for found in (
            out_of_step(beats),
            waiting_in_a_circle(beats, self._info.world_size, self._patience),
        ):
            if found is not None:
                self._announce(f"hang {found}")

    def _judge(self, beat: Beat) -> None:
        silent = time.monotonic() - self._heard[beat.rank][1]
        process = process_state(beat, self._host, self._pids)
        found = verdict(beat, silent, process, self._patience)
        if found is None:
            return
        beat = self._read(beat.rank) or beat  # it may have left in between
        if beat.state == "alive" or verdict(beat, silent, process, self._patience):
            self._announce(f"lost {beat.name} {found}; it was last seen in {beat}{self._here()}")

    def _read(self, rank: int) -> Beat | None:
        key = f"rank_{rank}"
        if not self._store.check([key]):
            return None
        beat = Beat.decode(self._store.get(key).decode())
        self._answered = time.monotonic()
        self._known[rank] = beat
        if self._heard.get(rank, (-1, 0.0))[0] != beat.number:
            self._heard[rank] = (beat.number, time.monotonic())
        return beat

    def _everybody(self) -> list[Beat]:
        beats = [self._read(rank) for rank in range(self._info.world_size)]
        return [beat for beat in beats if beat is not None]

    # the end

    def _announce(self, text: str) -> None:
        """To all ranks; the first to find something is the one to say it."""
        mine = f"{self._info.rank} {text}"
        told = self._store.compare_set("announced", "", mine).decode()
        self._end(told.partition(" ")[2], speaks=told == mine)

    def _here(self) -> str:
        """What is seen of another rank may be a second old; this is not."""
        step, phase = self._where()
        waiting = self._operations.waiting or self._operations.last
        return f"; rank {self._info.rank} is at step {step}{f', {phase}' if phase else ''}, {waiting or 'starting'}"

    def _look_for_the_announcement(self) -> None:
        if self._store.check(["announced"]):
            self._end(self._store.get("announced").decode().partition(" ")[2], speaks=False)

    def _end(self, told: str, *, speaks: bool) -> None:
        kind, _, text = told.partition(" ")
        error = HangError(f"{text}. {_WAY_OUT}") if kind == "hang" else PeerLostError(f"{text}. {_WAY_OUT}")
        with self._ended:  # never given back: the first thread ends the process
            self._on_end(error, speaks)
            self._let_others_read()
            os._exit(error.exit_code)

    def _let_others_read(self) -> None:
        """Where rank 0 keeps the store, the store ends with this process."""
        if self._info.rank == 0 and not self._info.agent_store:
            time.sleep(3 * _EVERY)

    def _watch_the_store(self) -> None:
        """Without the store nobody can tell anybody: every rank judges its host by itself, and says so."""
        while not self._closed.wait(_EVERY):
            silent = time.monotonic() - self._answered
            if silent <= 3 * _EVERY:
                continue
            host = self._known.get(0)
            if self._info.agent_store or host is None:
                found, where = (None, "") if silent <= self._patience else ("does not answer", "")
                name = f"the launcher's store at {self._info.master_addr}:{self._info.master_port}"
            else:
                found = verdict(host, silent, process_state(host, self._host, self._pids), self._patience)
                name, where = f"{host.name}", f"; it was last seen in {host}{self._here()}"
            if found is not None:
                self._end(f"lost {name} {found}{where}", speaks=True)


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no such file system here
        return ""

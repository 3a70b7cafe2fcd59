"""Plain values sent between ranks: what arrives, and that a foreign rank can do no harm."""

from __future__ import annotations

import os
import pickle
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.distributed.launch import shutdown
from megatron.distributed.messages import LARGEST_MESSAGE, all_gather_json, broadcast_json
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError, MegatronError, PeerLostError, StorageError
from megatron.layout import Layout
from tests.helpers.distributed import run_ranks


@dataclass(frozen=True)
class Part:
    numbers: tuple[int, ...]
    place: Path | None
    share: float


VALUES = [Part((2**70, -1, 0), Path("a/ü\udcff"), 0.1), Part((), None, float("inf"))]


def asks_around(rank: int) -> list[Any]:
    state = ParallelState.build(Layout(4, tp=2), rank)
    return [
        all_gather_json(VALUES[rank % 2], state.tp, Part),
        all_gather_json("x" * rank, state.world, str),
        all_gather_json({"rank": rank}, state.dp, dict[str, int]),
        broadcast_json(VALUES[1] if state.dp.rank == 1 else None, state.dp, Part, source=1),
    ]


def test_values_come_back_as_they_went() -> None:
    for rank, (parts, texts, ranks, part) in enumerate(run_ranks(4, asks_around)):
        assert parts == VALUES and texts == ["", "x", "xx", "xxx"] and part == VALUES[1]
        assert ranks == [{"rank": rank % 2}, {"rank": rank % 2 + 2}]


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def sends_a_pickle(rank: int, proof: Path) -> str:
    """The last rank sends a pickle, as a program with torch's object collectives does."""
    state = ParallelState.build(Layout(2), rank)
    if rank == 1:
        data = torch.frombuffer(bytearray(pickle.dumps(Evil(proof))), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = int(max(sizes))
        dist.all_gather([torch.empty(longest, dtype=torch.uint8) for _ in range(2)], data.resize_(longest))
        dist.broadcast(torch.tensor([len(data)]), 1)
        dist.broadcast(data, 1)
        return "sent"
    said = []
    for receive in (
        lambda: all_gather_json("a message", state.world, str),
        lambda: broadcast_json(None, state.world, str, source=1),
    ):
        with pytest.raises(PeerLostError) as caught:
            receive()
        said.append(str(caught.value))
    return "\n".join(said)


def test_a_pickle_is_refused_and_executes_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    said, _ = run_ranks(2, sends_a_pickle, proof)
    assert not proof.exists()
    for line in said.splitlines():
        assert line.startswith("rank 1 sent data that is not a message of this program (") and "same version" in line
    pickle.loads(pickle.dumps(Evil(proof)))
    assert proof.exists(), "the planted pickle does execute where somebody loads it"


HOSTILE: dict[str, tuple[bytes, str]] = {
    "half a message": (b'{"numbers": [1', "Expecting"),
    "text that is no UTF-8": (b'"\xff\xfe"', "codec"),
    "another type": (b"[1, 2]", "part is list, not an object"),
    "a missing field": (b'{"numbers": [], "share": 1}', "part.place is missing"),
    "an unknown field": (b'{"numbers": [], "place": null, "share": 1, "run": "rm"}', "part.run is not known"),
    "a number for a path": (b'{"numbers": [], "place": 3, "share": 1}', "part.place is int, not text"),
    "a deep list": (b"[" * 100_000, "recursion"),
    "a number of 5000 digits": (b'{"numbers": [' + b"9" * 5000 + b"]}", "integer string conversion"),
    "nothing": (b"", "a length of 0 bytes"),
}


def hears(rank: int, sent: bytes, length: int) -> str:
    state = ParallelState.build(Layout(2), rank)
    if rank == 1:
        dist.broadcast(torch.tensor([length]), 1)
        if 0 < length <= LARGEST_MESSAGE:
            dist.broadcast(torch.frombuffer(bytearray(sent), dtype=torch.uint8), 1)
        return "sent"
    with pytest.raises(PeerLostError) as caught:
        broadcast_json(None, state.world, Part, source=1)
    return str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_message_is_one_line(name: str) -> None:
    sent, why = HOSTILE[name]
    said = run_ranks(2, hears, sent, len(sent))[0]
    assert why in said and "\n" not in said and len(said) < 500


@pytest.mark.parametrize("length", [-1, LARGEST_MESSAGE + 1, 2**62])
def test_an_impossible_length_allocates_nothing(length: int) -> None:
    assert f"a length of {length} bytes" in run_ranks(2, hears, b"", length)[0]


def fails_on_one(rank: int, error: Exception) -> tuple[str, str]:
    def work() -> int:
        if rank == 1:
            raise error
        return rank

    with pytest.raises(Exception) as caught:
        run_on_all(work, ParallelState.build(Layout(2), rank).world)
    return type(caught.value).__name__, str(caught.value)


class OwnError(MegatronError):
    """An error class that only its own module knows."""


@pytest.mark.parametrize(
    ("error", "seen", "text"),
    [
        (StorageError("disk full"), StorageError, "disk full"),
        (DamagedCheckpointError("bad bytes"), DamagedCheckpointError, "bad bytes"),
        (OwnError("own"), MegatronError, "own"),
        (KeyError("bug"), CheckpointError, "KeyError: 'bug'"),
    ],
)
def test_an_error_travels_as_its_kind_and_text(error: Exception, seen: type[Exception], text: str) -> None:
    there, here = run_ranks(2, fails_on_one, error)
    assert there == (seen.__name__, f"{text} (on rank 1)")
    assert here[0] == type(error).__name__


def works_for_long(rank: int, watched: bool) -> str:
    """Works longer than the timeout of the group's collectives, one second."""
    axis = ParallelState.build(Layout(2, cp=2), rank, timedelta(seconds=1)).cp
    assert axis.comm_log is not None
    axis.comm_log.watched = watched
    try:
        run_on_all(lambda: time.sleep(2.0 * rank), axis)
    except RuntimeError:
        return "not all came in time"
    return "all came"


@pytest.mark.parametrize(("watched", "ended"), [(True, "all came"), (False, "not all came in time")])
def test_ranks_that_a_heartbeat_watches_wait_without_a_limit_for_one_that_works_with_files(
    watched: bool, ended: str
) -> None:
    assert run_ranks(2, works_for_long, watched) == [ended, ended]


def waits_for_one_that_has_gone(rank: int) -> str:
    dist.barrier()
    if rank == 1:
        shutdown(barrier=False)
        return "gone"
    with pytest.raises(PeerLostError) as caught:
        shutdown(timeout=timedelta(seconds=600))
    return str(caught.value)


def test_the_last_wait_says_how_long_it_was() -> None:
    assert re.match(r"rank 0 waited \d s for the others to finish: ", run_ranks(2, waits_for_one_that_has_gone)[0])

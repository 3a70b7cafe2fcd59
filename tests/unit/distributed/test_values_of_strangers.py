"""Another program writes into the ranks' store. No value may end a watching thread or hide a lost rank, and a false
announcement may not end a run silently."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megatron.distributed import heartbeat
from megatron.distributed.failure_detection import RankStatus
from megatron.distributed.identity import Identity
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.meeting import Patience, wait_for_all
from megatron.distributed.status_board import StatusBoard
from megatron.distributed.store_values import (
    QUOTED,
    Announcement,
    FirstRank,
    Unreadable,
    parse_announcement,
    parse_first_rank,
    parse_identity,
    parse_ranks,
    parse_recent,
    parse_status,
)
from megatron.errors import ConfigError, HangError, PeerLostError
from tests.unit.distributed.cluster import PATIENCE, Cluster, CountedStore, Ended

SEED = 26
WORLD = 4
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -1e308, "", "alive", "left\x1b[2J", "\ud800", "9" * 5000,
    [], [None], [[]], [0], [-1], [0, 10**12, 1], [0, WORLD, 0], {}, {"dp": "1"}, {"dp": []}, {"": {}},
    ["all_reduce", "dp", [0, 2, 1], 1, [4], 1], ["all_reduce", "dp", [], 1, [4], False], [1, 2, 3, 4, 5, 6],
    ["all_reduce", "dp", [0, 10**12, 1], 1, None, False], ["x", "dp", [-1, WORLD], 1, None, False],
]  # fmt: skip
TEXTS = [
    b"", b"\xff\xfe\x00", b"null", b"[]", b"{", b"NaN", b"-Infinity", b"1e999", b'"text"', b"[" * 100_000, b"\x00" * 99,
    b'{"a":' * 50_000, b"9" * 100_000, b"x" * (8 << 20), "\u202e\x1b]0;title\x07".encode(), b'{"rank": 1}',
]  # fmt: skip


def garbage(draw: random.Random, of: bytes) -> bytes:
    """A complete value of another kind, random bytes, or `of` with one field or byte replaced."""
    how = draw.randrange(6)
    if how == 0:
        return draw.choice(TEXTS)
    if how == 1:
        return draw.randbytes(draw.randrange(40))
    if how == 2:
        return of[: draw.randrange(len(of))]
    values = json.loads(of)
    values[draw.choice(sorted(values))] = draw.choice(VALUES)
    if how == 3:
        values.pop(draw.choice(sorted(values)))
    if how == 4:
        values["another"] = 1
    return json.dumps(values).encode()


def hostile(status: bytes, draw: random.Random) -> tuple[str, bytes]:
    """(key, value) that no rank would write."""
    key, own = draw.choice([("rank_", status), ("recent_", b'{"dp": []}'), ("asked", b"")])
    if key == "asked":
        return key, garbage(draw, b'{"a": 1}')
    while True:
        rank, value = draw.randrange(WORLD), garbage(draw, own)
        found = parse_status(value, rank, WORLD) if key == "rank_" else parse_recent(value, WORLD)
        if isinstance(found, Unreadable):
            return f"{key}{rank}", value


def test_every_field_survives_every_value() -> None:
    """Fields of a status, elements of an operation, whole values: each parses as a rank's, or as unreadable."""
    operation: list[Any] = ["all_reduce", "dp", [0, 2, 1], 1, [4], False]
    cluster = Cluster(WORLD)
    status = {**json.loads(cluster.store.values["rank_1"]), "last": operation, "counts": {"dp": 1}}
    assert isinstance(parse_status(json.dumps(status).encode(), 1, WORLD), RankStatus)
    operations = [[*operation[:at], value, *operation[at + 1 :]] for at in range(6) for value in VALUES]
    operations += [[*operation[:2], [*[0, 2, 1][:at], value], *operation[3:]] for at in range(3) for value in VALUES]
    texts = [json.dumps({**status, name: value}).encode() for name in status for value in VALUES]
    texts += [json.dumps({**status, "waiting": one}).encode() for one in operations]
    texts += [json.dumps({**status, "counts": {"dp": value}}).encode() for value in VALUES]
    texts += [json.dumps({"dp": [one]}).encode() for one in operations]
    texts += [json.dumps([0, "a", *values]).encode() for values in zip(VALUES, reversed(VALUES))]
    texts += [json.dumps([value, "a", {}, {}]).encode() for value in VALUES]
    for raw in [*TEXTS, *texts, *(json.dumps(value).encode() for value in VALUES)]:
        found = parse_status(raw, 1, WORLD)
        assert isinstance(found, Unreadable | RankStatus)
        if isinstance(found, RankStatus):
            assert str(found).isprintable() and 0 <= found.idle < 2**64 and found.rank == 1
            assert all(set(one.ranks) <= set(range(WORLD)) and one.ranks for one in (found.waiting, found.last) if one)
        assert isinstance(parse_recent(raw, WORLD), Unreadable | dict)
        assert isinstance(parse_first_rank(raw), Unreadable | FirstRank)
        assert isinstance(parse_identity(raw), Unreadable) and parse_ranks(raw, WORLD) <= set(range(WORLD))
        assert isinstance(parse_announcement(raw, WORLD), Unreadable)


def lose(cluster: Cluster, rank: int) -> None:
    """Ends a rank's heartbeats. It is on another machine, because a lost process on the same machine would be seen."""
    cluster.ranks[rank]._host = "gone"
    for _ in cluster.pass_time(2.0):
        pass
    cluster.beating.discard(rank)


@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_no_value_ends_the_watch_of_the_ranks(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that stops afterwards is named, although its own last status is garbage."""
    draw, cluster = random.Random(seed), Cluster(WORLD)
    cluster.wait(range(WORLD - 1))  # so that the rank in charge is asked, and reads everything
    for _ in range(3):  # seconds
        next(cluster.pass_time(1.0))
    status = cluster.store.values["rank_1"]
    for _ in range(60):
        for _ in range(4):
            cluster.store.set(*hostile(status, draw))
        next(cluster.pass_time(1.0))
    assert not cluster.ended
    warnings = capsys.readouterr().err.splitlines()
    assert 1 <= len(warnings) <= WORLD + 1 and all(line.startswith("warning: the ranks' store") for line in warnings)
    assert all(line.isprintable() and len(line) < QUOTED + 300 for line in warnings)
    lose(cluster, 3)
    cluster.store.set("rank_3", garbage(draw, b'{"a": 1}'))
    for _ in cluster.pass_time(60.0):
        pass
    assert len(cluster.ended) == WORLD - 1, cluster.ended
    assert all(isinstance(error, PeerLostError) and "rank 3 (process" in str(error) for _, error, _ in cluster.ended)
    assert sum(prints for *_, prints in cluster.ended) == 1


def test_a_rank_that_somebody_else_says_has_left_is_still_watched() -> None:
    cluster = Cluster(WORLD)
    for _ in cluster.pass_time(3.0):
        pass
    status = json.loads(cluster.store.values["rank_1"])
    cluster.store.set("rank_1", json.dumps({**status, "state": "left", "number": status["number"] + 9}))
    cluster.ranks[0].look()
    for _ in cluster.pass_time(3.0):
        pass
    lose(cluster, 1)
    for _ in cluster.pass_time(60.0):
        pass
    assert [str(error) for _, error, _ in cluster.ended if "rank 1 (process" in str(error)], cluster.ended


FALSE = {
    "of a rank that lives": (b"1 lost rank 2 \x1b[31mis gone", 17),
    "of another kind": (b"1 exploded rank 2", 17),
    "a hang": (b"2 hang all ranks wait", 16),
    "of no rank": (b"99 lost rank 2", 17),
    "of a negative rank": (b"-1 lost rank 2", 17),
    "not UTF-8": (b"1 lost \xff\xfe", 17),
    "empty": (b"", 17),
    "long": (b"1 lost " + b"x" * 100_000, 17),
    "JSON": (json.dumps({"rank": 1}).encode(), 17),
    "a number": (b"7", 17),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_false_announcement_is_printed_on_each_machine_and_by_whom_it_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_SEEN_TO_PRINT_WITHIN", 0.1)
    cluster = Cluster(WORLD, on_each_machine=2)
    value, code = FALSE[name]
    cluster.store.set("announced", value)
    for _ in cluster.pass_time(2.0):
        pass
    assert {error.exit_code for _, error, _ in cluster.ended} == {code} and len(cluster.ended) == WORLD
    printed = {number: str(error) for number, error, prints in cluster.ended if prints}
    assert printed.keys() == ({0, 1} if value.startswith(b"1 lost rank") else {0, 2})
    for text in printed.values():
        assert "an announcement in the ranks' store ends the run" in text and text.isprintable(), text
        assert len(text) < QUOTED + 400 and "another program writes there" in text
        quoted = text.split('"')[1]
        assert quoted and len(quoted) <= QUOTED if value else not quoted


def test_a_false_announcement_with_a_false_status_is_printed_by_the_rank_it_names() -> None:
    """The status says that rank 1 has announced a failure, so other machines' first ranks leave the line to it."""
    cluster = Cluster(WORLD, on_each_machine=2)
    status = json.loads(cluster.store.values["rank_1"])
    cluster.store.set("rank_1", json.dumps({**status, "state": "announced", "number": status["number"] + 9}))
    cluster.store.set("announced", b"1 lost rank 2 is gone")
    for number in (0, 2, 3, 1):
        with pytest.raises(Ended):
            cluster.ranks[number].look()
    assert [number for number, _, prints in cluster.ended if prints] == [1]
    assert "another program writes there" in str(cluster.ended[-1][1])


def test_a_key_that_is_gone_is_not_waited_for() -> None:
    """The store would wait for a missing key. Every rank uses the last status instead, and the run continues."""
    cluster = Cluster(WORLD)
    cluster.wait(range(WORLD - 1))  # so that the rank in charge is asked, and reads everything
    for _ in range(90):
        for key in ("rank_1", "rank_3", "recent_0", "asked"):
            cluster.store.values.pop(key, None)
        next(cluster.pass_time(1.0))
    assert not cluster.ended
    lose(cluster, 3)
    del cluster.store.values["rank_3"]
    for _ in cluster.pass_time(60.0):
        pass
    assert len(cluster.ended) == WORLD - 1
    assert all("rank 3 (process" in str(error) for _, error, _ in cluster.ended)


def test_a_key_that_is_deleted_after_the_look_ends_the_read_and_not_the_run() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(hours=1), wait_for_workers=False)
    board = StatusBoard(dist.PrefixStore("run", store), WORLD)
    with pytest.raises(RuntimeError, match="timeout"):
        board._store.multi_get(["rank_1"])


@pytest.mark.parametrize("note", [b"", b"1", b"2", b"99", b"\xff", b"failed"])
def test_a_note_of_a_failure_counts_where_the_status_says_the_same(note: bytes) -> None:
    cluster = Cluster(WORLD)
    cluster.store.set("failed", note)
    assert not cluster.board.someone_failed()
    cluster.ranks[1].fail("ValueError: x")
    assert cluster.board.someone_failed()


def test_a_question_stays_unanswered_until_all_ranks_were_read() -> None:
    """A read that the store did not answer is repeated at the next beat."""
    cluster = Cluster(WORLD)
    cluster.wait(range(WORLD))
    next(cluster.pass_time(PATIENCE + 2))
    cluster.board.ask()
    heartbeat, read = cluster.ranks[0], cluster.board.read
    cluster.board.read = Mock(side_effect=dist.DistStoreError("timed out"))  # type: ignore[method-assign]
    with pytest.raises(dist.DistStoreError):
        heartbeat.answer(cluster.board)
    cluster.board.read = Mock(side_effect=read)  # type: ignore[method-assign]
    heartbeat.answer(cluster.board)
    assert cluster.board.read.called


def test_an_announcement_that_its_rank_has_made_is_printed_by_that_rank_alone() -> None:
    cluster = Cluster(WORLD, on_each_machine=2)
    with pytest.raises(Ended):
        cluster.ranks[3]._announce("lost", "rank 1 is gone\nin two lines")
    cluster.beating.discard(3)
    for _ in cluster.pass_time(2.0):
        pass
    assert [number for number, _, prints in cluster.ended if prints] == [3] and len(cluster.ended) == WORLD


def test_an_announcement_that_its_own_rank_reads_at_once_is_its_own() -> None:
    """The heartbeat thread may read the announcement before the answering thread continues."""
    cluster = Cluster(WORLD)
    rank, announce = cluster.ranks[3], cluster.ranks[3]._board.announce

    def then_read(mine: Announcement) -> bytes:
        first = announce(mine)
        rank._read_announcement()
        return first

    rank._board.announce = then_read  # type: ignore[method-assign]
    with pytest.raises(Ended):
        rank._announce("hang", "rank 1 waits")
    ((number, error, prints),) = cluster.ended
    assert (number, prints) == (3, True) and isinstance(error, HangError) and str(error).startswith("rank 1 waits; ")


@pytest.mark.parametrize("key", ["identity", "identity_values", "outcome", "came", "number", "came_1", "told_0"])
def test_ranks_that_meet_survive_any_value(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank ends with one line. `init_process_group` turns a connection error of the store into one."""
    draw, other = random.Random(SEED), Identity(0, {"--seed": "2"})
    values = [*TEXTS, *(garbage(draw, b'{"rank": 0, "values": {}, "shown": {}}') for _ in range(20))]
    for value in values:
        store = CountedStore()
        if key == "identity_values":
            store.set("identity", f"{other.digest} 0")
        store.set(key, value)
        info = LaunchInfo(rank=1, world_size=2, local_world_size=2, master_port=1234)
        with pytest.raises((ConfigError, HangError, dist.DistNetworkError)) as raised:
            wait_for_all(store, Identity(1, {"--seed": "1"}), info, Patience(timedelta(seconds=0.001)))  # type: ignore[arg-type]
        text = str(raised.value)
        assert text.isprintable() and len(text) < QUOTED + 300
        assert key not in ("identity_values", "outcome") or "1234: the ranks' store holds" in text or not value
    assert capsys.readouterr().err.isprintable

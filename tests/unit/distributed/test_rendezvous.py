"""The ranks of a run meet in a store that only they reach; waiting is neither silent nor endless."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

from megatron.distributed import interface, rendezvous
from megatron.distributed.identity import Identity
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.meeting import spans
from megatron.distributed.rendezvous import init_process_group, meet, open_to_other_machines
from megatron.errors import ConfigError, HangError, PeerLostError


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ranks_of(world: int, port: int) -> list[LaunchInfo]:
    return [
        LaunchInfo(rank=r, world_size=world, local_rank=r, local_world_size=world, master_port=port)
        for r in range(world)
    ]


class Meeting:
    """Runs ranks as threads and keeps the result of each."""

    def __init__(self, seconds: float, told_every: float) -> None:
        self._timeout, self._told_every = timedelta(seconds=seconds), told_every
        self._threads: dict[int, Thread] = {}
        self.became: dict[int, Any] = {}

    def come(self, *ranks: LaunchInfo, started_with: Mapping[str, str] | None = None) -> None:
        for info in ranks:
            self._threads[info.rank] = thread = Thread(target=self._meet, args=(info, started_with))
            thread.start()

    def _meet(self, info: LaunchInfo, started_with: Mapping[str, str] | None) -> None:
        try:
            self.became[info.rank] = meet(info, self._timeout, self._told_every, started_with)
        except Exception as error:
            self.became[info.rank] = error

    def end(self) -> dict[int, Any]:
        for thread in self._threads.values():
            thread.join(60)
            assert not thread.is_alive()
        return self.became


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def until(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    found: list[str] = []
    while not any(words in line for line in found):
        time.sleep(0.05)
        found += lines(capsys)
    return found


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_were_started_with_other_settings_are_told_what_differs(odd: int) -> None:
    """All ranks raise at once with the same message, whichever comes first."""
    ranks, meeting = ranks_of(3, free_port()), Meeting(60, 60.0)
    usual, other = {"--lr": "0.1", "--seed": "1", "torch": "2.13"}, {"--lr": "0.1", "--seed": "2", "--bf16": "True"}
    for info in ranks:
        meeting.come(info, started_with=other if info.rank == odd else usual)
    became = meeting.end()
    assert all(type(error) is ConfigError for error in became.values()), became
    (text,) = {str(error) for error in became.values()}
    assert "was started with other settings or code than rank" in text and "--lr" not in text
    assert (
        re.search(r"--seed is [12] on rank \d and [12] on rank \d", text)
        and "--bf16 is " in text
        and "torch is " in text
    )


def test_ranks_with_the_same_settings_meet() -> None:
    ranks, meeting = ranks_of(3, free_port()), Meeting(60, 60.0)
    for info in ranks:
        meeting.come(info, started_with={"--lr": "0.1"})
    assert all(isinstance(store, dist.Store) for store in meeting.end().values())


def test_many_differences_are_counted() -> None:
    first, other = {f"--flag-{i}": "1" for i in range(9)}, {f"--flag-{i}": "2" for i in range(9)}
    text = Identity(7, other).difference(Identity(0, first), theirs="rank 0 (a)", ours="rank 7 (b)")
    assert text.startswith(
        "rank 7 (b) was started with other settings or code than rank 0 (a): --flag-0 is 1 on rank 0 "
    )
    assert text.count("on rank 0 and") == 5 and "; and 4 more; start all ranks with one command" in text


def test_ranks_that_come_late_are_named_until_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    ranks, meeting = ranks_of(5, free_port()), Meeting(60, 0.2)
    meeting.come(ranks[0], ranks[2])
    for _ in range(2):  # it is repeated
        for line in until("ranks 1, 3-4 have not come (2 of 5 have)", capsys):
            assert "has waited for the others for" in line and "s (limit 60 s): rank" in line
    meeting.come(*ranks[3:])
    until("rank 1 has not come (4 of 5 have)", capsys)
    meeting.come(ranks[1])
    stores = meeting.end()
    stores[4].set("key", "value")
    assert all(stores[rank].get("key") == b"value" for rank in range(5))


def test_all_ranks_end_when_the_time_of_one_is_up_and_for_the_same_reason(capsys: pytest.CaptureFixture[str]) -> None:
    ranks, meeting = ranks_of(4, free_port()), Meeting(1.5, 60.0)
    meeting.come(*(ranks[rank] for rank in (0, 1, 3)))
    texts = {str(error) for error in meeting.end().values() if isinstance(error, HangError)}
    assert len(meeting.became) == 3
    (text,) = texts
    assert "--distributed-timeout-minutes 0.025: " in text and "rank 2 has not come (3 of 4 have)" in text
    assert len(lines(capsys)) == 1  # the round that the end cut short


def test_a_store_that_is_not_opened_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    port, meeting = free_port(), Meeting(1.0, 0.3)
    meeting.come(ranks_of(3, port)[1], ranks_of(3, port)[2])
    assert all(isinstance(error, HangError) for error in meeting.end().values()), meeting.became
    said = lines(capsys)
    assert said and all(line.startswith("rank 1 has waited for the others") for line in said), (
        "one rank speaks for the machine"
    )
    assert said[0].endswith(f"rank 0, which keeps the store, does not answer at 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("rank", "host", "reason"),
    [
        (0, "198.51.100.7", "not even here, on its own machine: MASTER_ADDR must be an address"),
        (1, "no-such-host.invalid", "this machine cannot resolve that name: correct MASTER_ADDR"),
    ],
)
def test_an_address_that_is_not_that_of_rank_0_is_told_as_such(rank: int, host: str, reason: str) -> None:
    meeting = Meeting(0.5, 60.0)
    meeting.come(LaunchInfo(rank=rank, world_size=2, master_addr=host, master_port=9))
    error = meeting.end()[rank]
    assert isinstance(error, HangError) and f"{host}:9" in str(error) and reason in str(error)


def test_a_program_that_accepts_and_says_nothing_does_not_hold_a_rank_for_ever() -> None:
    """Rank 0 failed to bind the port; the others connect to the program that has it."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        meeting = Meeting(0.5, 60.0)
        meeting.come(ranks_of(2, busy.getsockname()[1])[1])
        error = meeting.end()[1]
    assert isinstance(error, HangError) and "does not answer" in str(error)


def test_a_rank_that_is_there_twice_is_refused() -> None:
    ranks, meeting = ranks_of(2, free_port()), Meeting(60, 60.0)
    meeting.come(ranks[0])
    store = dist.TCPStore("127.0.0.1", ranks[0].master_port, timeout=timedelta(seconds=60), wait_for_workers=False)
    dist.PrefixStore("none/attempt_0", store).add("came_1", 1)
    with pytest.raises(ConfigError, match=r"--master-port \d+: another process has already joined as rank 1"):
        meet(ranks[1], timedelta(seconds=60))
    dist.PrefixStore("none/attempt_0", store).set("outcome", "late: enough")
    assert isinstance(meeting.end()[0], HangError)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "3"), ([0, 1, 2, 7], "0-2, 7"), (range(8, 16), "8-15"), (range(0, 80, 2), "0, 2, 4")]
)
def test_ranks_are_listed_by_machines(ranks: Sequence[int], text: str) -> None:
    listed = spans(ranks)
    assert listed.startswith(text) and len(listed) < 120 and (len(ranks) < 20 or listed.endswith("(40 in all)"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_a_store_on_one_machine_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **options: kept.append(options["store"]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    kept: list[Any] = []
    ranks = [
        LaunchInfo(rank=r, world_size=2, local_rank=r, local_world_size=2, master_addr="localhost", master_port=port)
        for r in (0, 1)
    ]
    threads = [Thread(target=init_process_group, args=(info, "gloo", timedelta(seconds=60))) for info in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(kept) == 2
    kept[0].set("key", "value")
    assert kept[1].get("key") == b"value"
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    assert [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")] == [
        f"0100007F:{port:04X}"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::", "::1", "::ffff:127.0.0.1"])
def test_a_launchers_store_that_other_machines_reach_is_said(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_interfaces", lambda: {"127.0.0.1": "lo", "10.0.0.5": "eth0"})
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as store:
        store.bind((address, 0))
        store.listen()
        port = store.getsockname()[1]
        info = LaunchInfo(world_size=2, local_world_size=2, master_port=port, launcher="torchrun", agent_store=True)
        line = open_to_other_machines(info)
        assert (line is not None) == (address in ("0.0.0.0", "::")), line
        assert line is None or (f"(port {port})" in line and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in line)
        for other in (
            replace(info, agent_store=False),  # ours: it listens on loopback
            replace(info, local_world_size=1),  # on several machines
            replace(info, world_size=1, local_world_size=1),
            replace(info, run_id="3f0e8a52-0a35-4c1e-9f38-5b3a2f9be2d1"),  # torchrun --nproc_per_node 2 chose the port
        ):
            assert open_to_other_machines(other) is None
        monkeypatch.setattr(interface, "_interfaces", lambda: {"127.0.0.1": "lo", "::1": "lo"})
        assert open_to_other_machines(info) is None, "there is no other machine"


def test_a_busy_port_is_one_line() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        info = LaunchInfo(rank=0, world_size=2, local_world_size=2, master_port=busy.getsockname()[1])
        with pytest.raises(
            ConfigError, match=r"--master-port \d+: already in use on this machine; choose another port"
        ):
            init_process_group(info, "gloo", timedelta(seconds=5))


def test_a_network_that_fails_is_told_with_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting")

    line = "gloo connects over docker0 (172.17.0.1), unless GLOO_SOCKET_IFNAME names another interface"
    monkeypatch.setattr(rendezvous, "_choose_gloo_interface", lambda info: line)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(rendezvous, "meet", fails)
    with pytest.raises(PeerLostError, match=r"timed out connecting; gloo connects over docker0 .*unless GLOO"):
        init_process_group(LaunchInfo(world_size=2), "gloo", timedelta(seconds=1))

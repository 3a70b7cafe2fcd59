"""gloo's network interface must lead to the other machines, whatever this machine's host name resolves to."""

from __future__ import annotations

import socket

import pytest

from megatron.distributed import interface
from megatron.distributed.interface import Interface, interface_towards, source_address


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_interfaces", lambda: {"127.0.0.1": "lo", "10.0.0.5": "ib0", "192.0.2.7": "eth0"})


def routes(monkeypatch: pytest.MonkeyPatch, by_host: dict[str, str]) -> None:
    monkeypatch.setattr(interface, "source_address", by_host.get)


def test_the_route_to_the_first_machine_decides(two_cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    routes(monkeypatch, {"node0": "10.0.0.5", "198.51.100.1": "192.0.2.7"})
    assert interface_towards("node0") == Interface("ib0", "10.0.0.5")


def test_on_the_first_machine_it_is_the_default_route(two_cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own name resolves to loopback."""
    routes(monkeypatch, {"node0": "127.0.1.1", "198.51.100.1": "192.0.2.7"})
    assert interface_towards("node0") == Interface("eth0", "192.0.2.7")


def test_an_unknown_network_is_left_to_gloo(two_cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    routes(monkeypatch, {"node0": "127.0.0.1"})
    assert interface_towards("node0") is None
    routes(monkeypatch, {"node0": "203.0.113.9"})  # an address of no interface that we know
    assert interface_towards("node0") is None


def test_without_a_default_route_the_only_card_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """First machine of a cluster without a default route; its own name resolves to loopback."""
    cards = {"127.0.0.1": "lo", "::1": "lo", "192.168.7.1": "ib0", "fe80::1": "eth0", "fd00::1": "ib0"}
    monkeypatch.setattr(interface, "_interfaces", lambda: cards)
    routes(monkeypatch, {"node0": "127.0.1.1"})
    assert interface_towards("node0") == Interface("ib0", "192.168.7.1")


def test_the_system_is_asked() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1" and source_address("no such host") is None
    names = {name for _, name in socket.if_nameindex()}
    assert interface._interfaces()["127.0.0.1"] == "lo" and set(interface._interfaces().values()) <= names

"""Connects the ranks of a run through a store, and reports missing ranks.

Ranks may start minutes apart if nodes are slow, so a rank waits for the others up to --distributed-timeout-minutes.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist

from megatron.distributed import flight_recorder
from megatron.distributed.device import activate, group_backend, resolve_backend
from megatron.distributed.identity import Identity
from megatron.distributed.interface import interface_towards, reachable_port
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.meeting import TOLD_EVERY, Patience, never_met, say, wait_for_all
from megatron.errors import ConfigError, PeerLostError

_CLIENT_GIVES_UP_WITHIN = 10.0  # seconds after its timeout; never if a program accepts and sends nothing


@dataclass(frozen=True)
class Connection:
    """This rank's connection to the others."""

    store: dist.Store
    network: str | None
    """Log line about the network interface, or None."""


def init_process_group(
    info: LaunchInfo,
    backend: str,
    timeout: timedelta,
    device: torch.device | None = None,
    started_with: Mapping[str, str] | None = None,
    met: Callable[[], None] = lambda: None,
    collectives: timedelta | None = None,
) -> Connection | None:
    """Makes `device` the current one and joins the process group; a single process needs none. Values in `started_with`
    must be the same on all ranks. The function `met` is called when all ranks have arrived, before they connect.
    `timeout` limits the meeting and, unless `collectives` is set, each collective."""
    device = device or torch.device("cpu")
    activate(device)
    if info.world_size == 1:
        return None
    network = _choose_gloo_interface(info) if sys.platform == "linux" else None
    if backend != "gloo":  # with gloo the host itself waits, and that is logged
        flight_recorder.switch_on()
    try:
        store = meet(info, timeout, started_with=started_with)
        met()
        dist.init_process_group(
            group_backend(backend, device),
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=collectives or timeout,
            device_id=None if backend == "gloo" else device,
        )
    except (RuntimeError, OSError, dist.DistError) as error:
        raise _rendezvous_error(info, error, network) from error
    return Connection(store, network)


def open_group_of_one(device: torch.device) -> None:
    """Opens a process group for a single process, for code that requires one; `shutdown` closes it."""
    backend = group_backend(resolve_backend(None, device), device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _choose_gloo_interface(info: LaunchInfo) -> str | None:
    """Sets the interface of gloo's connections, unless the user has. Returns a line about it; None for loopback."""
    if info.single_node:
        # All ranks are on this machine: loopback works without host names and firewall rules, and no other machine can
        # connect to them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return None
    found = interface_towards(info.master_addr)
    if found is None:
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", found.name)
    return f"gloo connects over {found.name} ({found.address}), unless GLOO_SOCKET_IFNAME names another interface"


def open_to_other_machines(info: LaunchInfo) -> str | None:
    """Warns if the launcher's store accepts other machines although all ranks are on this one.

    There is no warning if torchrun chose the port, as in most runs on one machine: the ranks then meet on loopback. The
    remaining risk is in docs/parallelism.md.
    """
    if info.world_size == 1 or _standalone(info):
        return None
    if not (info.single_node and info.agent_store and reachable_port(info.master_port)):
        return None
    return (
        f"torchrun's store listens on all network interfaces (port {info.master_port}), although all ranks are on this "
        "machine: a program on another machine that reaches the port can end the run. Start with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone ... to let the ranks meet on loopback "
        "(docs/parallelism.md#who-can-connect)"
    )


def _standalone(info: LaunchInfo) -> bool:
    """True if torchrun was started without an address. It then chooses a free port, and a UUID as the run's id."""
    return len(info.run_id) == 36 and info.run_id.count("-") == 4


def meet(
    info: LaunchInfo, timeout: timedelta, told_every: float = TOLD_EVERY, started_with: Mapping[str, str] | None = None
) -> dist.Store:
    """Returns the store of the run's ranks, after all have connected. Raises if their `started_with` differ.

    Every restart uses its own key prefix, because the keys of a killed attempt would make it connect to processes that
    no longer exist.
    """
    patience = Patience(timeout, told_every)
    store = dist.PrefixStore(f"{info.run_id}/attempt_{info.attempt}", _connected(info, patience))
    wait_for_all(store, Identity(info.rank, started_with or {}), info, patience)
    return store


def _connected(info: LaunchInfo, patience: Patience) -> dist.Store:
    """Connects in a thread, because torch's client waits forever for a program that accepts and sends nothing."""
    made: SimpleQueue[dist.Store | Exception] = SimpleQueue()
    listening = _listen_on_loopback(info.master_port) if info.keeps_store and info.single_node else None

    def connect() -> None:
        try:
            made.put(
                dist.TCPStore(
                    info.store_host,
                    info.master_port,
                    info.world_size,
                    info.keeps_store,
                    patience.timeout,
                    wait_for_workers=False,
                    master_listen_fd=listening,
                )
            )
        except Exception as error:
            made.put(error)

    connecting = Thread(target=connect, name="rendezvous", daemon=True)
    connecting.start()
    for seconds in patience.rounds():
        try:
            found = made.get(timeout=seconds)
        except Empty:
            if info.local_rank == 0 or info.rank == 1:  # one rank per machine: without the store they cannot agree
                say(info, patience, _no_answer(info))
            continue
        if isinstance(found, dist.DistError) and patience.waited >= patience.timeout.total_seconds():
            break
        if isinstance(found, Exception):
            raise found
        return found
    connecting.join(_CLIENT_GIVES_UP_WITHIN)  # a thread that returns from torch while Python exits aborts the process
    raise never_met(info, patience, _no_answer(info))


def _no_answer(info: LaunchInfo) -> str:
    keeper = "the launcher's store" if info.agent_store else "rank 0, which keeps the store,"
    text = f"{keeper} does not answer at {info.store_host}:{info.master_port}"
    try:
        socket.getaddrinfo(info.store_host, info.master_port)
    except (OSError, UnicodeError):
        return f"{text}; this machine cannot resolve that name: correct MASTER_ADDR, or /etc/hosts"
    if info.keeps_store:
        return f"{text}, not even here, on its own machine: MASTER_ADDR must be an address of the machine of rank 0"
    return text


def _listen_on_loopback(port: int) -> int:
    """Listening socket for the store, which then owns the socket. The store's own socket would listen on all
    interfaces, and while a job forms, any program that connects could answer in a rank's place."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(socket.SOMAXCONN)
        return listener.detach()


def _rendezvous_error(info: LaunchInfo, error: Exception, network: str | None) -> Exception:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if info.keeps_store and ("EADDRINUSE" in str(error) or "in use" in str(error)):
        return ConfigError(f"--master-port {info.master_port}: already in use on this machine; choose another port")
    return PeerLostError(
        f"rank {info.rank} of {info.world_size} could not meet the others at "
        f"{info.store_host}:{info.master_port} (attempt {info.attempt}): {reason}"
        f"{'' if network is None else f'; {network}'}"
    )

"""How the ranks of a run meet: the store that they all connect to, and who has not come yet.

Ranks start minutes apart where nodes are slow, so a rank waits for the others up to --distributed-timeout-minutes. It
does not do so in silence: every half a minute one rank says who is missing.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist

from megatron.distributed import flight_recorder
from megatron.distributed.device import activate, group_backend
from megatron.distributed.identity import Identity
from megatron.distributed.interface import interface_towards
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError, HangError, PeerLostError

TOLD_EVERY = 30.0  # seconds
_OTHERS_READ_WITHIN = 3.0
_CLIENT_GIVES_UP_WITHIN = 10.0  # of the timeout that it was given; it does not where a program is silent
_ALL_HERE, _UNLIKE = "all ranks are here", "unlike: "


def init_process_group(
    info: LaunchInfo,
    backend: str,
    timeout: timedelta,
    device: torch.device | None = None,
    started_with: Mapping[str, str] | None = None,
) -> str | None:
    """Makes `device` the current one and joins the process group; a single process needs none. Returns a line about the
    network, if there is something to say. `started_with`: values that must be the same on all ranks."""
    device = device or torch.device("cpu")
    activate(device)
    if info.world_size == 1:
        return None
    network = _choose_gloo_interface(info) if sys.platform == "linux" else None
    if backend != "gloo":  # whose waits are the host's own, and logged
        flight_recorder.switch_on()
    try:
        dist.init_process_group(
            group_backend(backend, device),
            store=meet(info, timeout, started_with=started_with),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=None if backend == "gloo" else device,
        )
    except (RuntimeError, OSError, dist.DistError) as error:
        raise _rendezvous_error(info, error) from error
    return network


def _choose_gloo_interface(info: LaunchInfo) -> str | None:
    """Sets the interface of gloo's connections, unless the user has. Returns a line that names it if not loopback."""
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


def meet(
    info: LaunchInfo, timeout: timedelta, told_every: float = TOLD_EVERY, started_with: Mapping[str, str] | None = None
) -> dist.Store:
    """The store of the run's ranks, when all of them have come to it with the same `started_with`.

    Every restart uses a key prefix of its own, because the keys of a killed attempt would make it connect to processes
    that no longer exist.
    """
    patience = _Patience(timeout, told_every)
    store = dist.PrefixStore(f"{info.run_id}/attempt_{info.attempt}", _connected(info, patience))
    _wait_for_all(store, Identity(info.rank, started_with or {}), info, patience)
    return store


@dataclass(frozen=True)
class _Patience:
    """How long a rank waits for the others, in rounds after each of which something may be said."""

    timeout: timedelta
    told_every: float
    started: float = field(default_factory=time.monotonic)

    @property
    def waited(self) -> float:
        return time.monotonic() - self.started

    def rounds(self) -> Iterator[float]:
        """The seconds to wait in each round, until the time is up."""
        while (left := self.timeout.total_seconds() - self.waited) > 0:
            yield min(self.told_every, left)


def _keeps_store(info: LaunchInfo) -> bool:
    return info.rank == 0 and not info.agent_store


def _connected(info: LaunchInfo, patience: _Patience) -> dist.Store:
    """Connects in a thread, because torch's client waits without end for a program that accepts and says nothing."""
    made: SimpleQueue[dist.Store | Exception] = SimpleQueue()
    listening = _listen_on_loopback(info.master_port) if _keeps_store(info) and info.single_node else None

    def connect() -> None:
        try:
            made.put(
                dist.TCPStore(
                    info.store_host,
                    info.master_port,
                    info.world_size,
                    _keeps_store(info),
                    patience.timeout,
                    wait_for_workers=False,
                    master_listen_fd=listening,
                )
            )
        except Exception as error:
            made.put(error)

    connecting = Thread(target=connect, name="rendezvous", daemon=True)
    connecting.start()
    keeper = "the launcher's store" if info.agent_store else "rank 0, which keeps the store,"
    missing = f"{keeper} does not answer at {info.store_host}:{info.master_port}"
    for seconds in patience.rounds():
        try:
            found = made.get(timeout=seconds)
        except Empty:
            if info.local_rank == 0 or info.rank == 1:  # one rank of every machine, as there is nothing to agree over
                _say(info, patience, missing)
            continue
        if isinstance(found, dist.DistError) and patience.waited >= patience.timeout.total_seconds():
            break
        if isinstance(found, Exception):
            raise found
        return found
    connecting.join(_CLIENT_GIVES_UP_WITHIN)  # a thread that comes back from torch while Python ends aborts the process
    raise _never_met(info, patience, missing)


def _wait_for_all(store: dist.Store, identity: Identity, info: LaunchInfo, patience: _Patience) -> None:
    """Work per rank does not grow with their number: the last one to come tells the others, and in every round the
    first one to run out of patience reads the list of those who came."""
    if store.add(f"came_{info.rank}", 1) > 1:
        raise ConfigError(
            f"--master-port {info.master_port}: another process is rank {info.rank} there already; choose another port "
            "if two jobs use this one, and start every rank once"
        )
    store.append("came", f"{info.rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it
    unlike = identity.unlike_first(store)
    if unlike is not None:
        store.compare_set("outcome", "", _UNLIKE + unlike)
    elif store.add("number", 1) == info.world_size:
        store.set("outcome", _ALL_HERE)
    for number, seconds in enumerate(patience.rounds()):
        try:
            store.wait(["outcome"], timedelta(seconds=seconds))
            break
        except dist.DistStoreError:  # not yet
            if store.add(f"told_{number}", 1) == 1:
                _say(info, patience, _missing(store, info))
    # Whose time is up decides for all, so that all ranks end for the same reason.
    mine = "" if store.check(["outcome"]) else str(_never_met(info, patience, _missing(store, info)))
    outcome = store.compare_set("outcome", "", mine).decode() if mine else store.get("outcome").decode()
    if outcome == _ALL_HERE:
        return
    if _keeps_store(info):
        time.sleep(_OTHERS_READ_WITHIN)
    raise ConfigError(outcome.removeprefix(_UNLIKE)) if outcome.startswith(_UNLIKE) else HangError(outcome)


def _missing(store: dist.Store, info: LaunchInfo) -> str:
    came = {int(rank) for rank in store.get("came").decode().split()}
    absent = [rank for rank in range(info.world_size) if rank not in came]
    verb = "s {} have" if len(absent) > 1 else " {} has"
    return f"rank{verb.format(_spans(absent))} not come ({len(came)} of {info.world_size} have)"


def _spans(ranks: Sequence[int]) -> str:
    """Such as "0, 8-15": whole machines are missing, as a rule."""
    among = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in among]
    ends = [rank for rank in ranks if rank + 1 not in among]
    spans = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends)]
    return ", ".join(spans[:20]) + (f", ... ({len(ranks)} in all)" if len(spans) > 20 else "")


def _say(info: LaunchInfo, patience: _Patience, missing: str) -> None:
    limit = patience.timeout.total_seconds()
    print(
        f"rank {info.rank} waits for the others for {patience.waited:.0f} s of at most {limit:.0f}: {missing}",
        file=sys.stderr,
        flush=True,
    )


def _never_met(info: LaunchInfo, patience: _Patience, missing: str) -> HangError:
    return HangError(
        f"--distributed-timeout-minutes {patience.timeout.total_seconds() / 60:g}: the ranks did not all meet at "
        f"{info.store_host}:{info.master_port} (attempt {info.attempt}): {missing}; see what the missing ones said, or "
        "give more time"
    )


def _listen_on_loopback(port: int) -> int:
    """A socket for the store, which takes it over. Left to itself, the store listens on all interfaces, and whoever
    connects while a job forms can answer in a rank's place."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(socket.SOMAXCONN)
        return listener.detach()


def _rendezvous_error(info: LaunchInfo, error: Exception) -> Exception:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if _keeps_store(info) and ("EADDRINUSE" in str(error) or "in use" in str(error)):
        return ConfigError(f"--master-port {info.master_port}: already in use on this machine; choose another port")
    return PeerLostError(
        f"rank {info.rank} of {info.world_size} could not meet the others at "
        f"{info.store_host}:{info.master_port} (attempt {info.attempt}): {reason}"
    )

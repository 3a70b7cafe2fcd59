"""Watches the ranks while they connect and make their groups: if one fails or is lost, the others end.

Without this watch, a rank would wait for a lost one until gloo gives up: several times --distributed-timeout-minutes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.distributed.comm_log import CommLog
from megatron.distributed.heartbeat import Heartbeat
from megatron.distributed.launch import LaunchInfo
from megatron.errors import MegatronError, PeerLostError
from megatron.utils.log import print_line


@contextmanager
def watched_start(info: LaunchInfo, patience: float) -> Iterator[Callable[[], None]]:
    """Yields a function that begins the watch; call it once all ranks have met. `patience`: seconds without a heartbeat
    after which a rank counts as lost; 0 disables the watch."""
    begun: list[Heartbeat] = []

    def begin() -> None:
        if not patience or info.world_size == 1:
            return
        heartbeat = Heartbeat(info, CommLog(), lambda: (0, "start"), end, patience=patience, keys="start")
        heartbeat.start()
        begun.append(heartbeat)

    def end(error: MegatronError, speaks: bool) -> None:
        if speaks:
            print_line(f"error (rank {info.rank}): {error}", sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()

    try:
        yield begin
    except BaseException as error:
        for heartbeat in begun:
            if isinstance(error, PeerLostError):
                heartbeat.explain()
            heartbeat.fail(f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    for heartbeat in begun:
        heartbeat.leave()

"""The edge of the process: errors become one line and an exit code, and the ranks leave together."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from megatron.errors import MegatronError, PeerLostError
from megatron.training.exit_reason import StopReason

_LAUNCHER_STOPS_US_WITHIN = 1.0  # seconds


def run_as_program(body: Callable[[], StopReason]) -> StopReason:
    """Run `body`; on an error of the user's or of the world, say it once and exit with its code."""
    try:
        reason = body()
        _leave(together=True)
        return reason
    except MegatronError as error:
        _say_once(error)
        _leave(together=False)
        sys.exit(error.exit_code)


def _leave(*, together: bool) -> None:
    if "torch" in sys.modules:  # else nothing was started that could be left
        from megatron.distributed.launch import shutdown

        shutdown(barrier=together)


def _say_once(error: MegatronError) -> None:
    """Rank 0 speaks first. An error of all ranks is then over, because the launcher ends the others; whoever is still
    alive after a moment has an error of its own, and says it."""
    rank = _rank()
    if rank != 0:
        time.sleep(_LAUNCHER_STOPS_US_WITHIN)
    where = f" (rank {rank})" if rank != 0 or isinstance(error, PeerLostError) else ""
    print(f"error{where}: {error}", file=sys.stderr, flush=True)


def _rank() -> int:
    from megatron.distributed.launch import LaunchInfo

    try:
        return LaunchInfo.detect().rank
    except MegatronError:  # the launch itself is what is wrong
        return 0

"""The edge of the process: errors become one line and an exit code, and the ranks leave together."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from megatron.config.tool import forget_stdout, not_installed, stdout_is_unread
from megatron.errors import ConfigError, InterruptError, MegatronError, PeerLostError, StorageError
from megatron.training.exit_reason import StopReason

# Seconds. The launcher ends the other ranks once one has left, so whoever was only affected waits longest.
_OTHERS_ARE_STOPPED_WITHIN = 4.0
_AFFECTED_WAITS = 8.0


def run_as_program(body: Callable[[], StopReason]) -> StopReason:
    """Run `body`; on an error of the user's or of the world, say it once and exit with its code.

    Any other exception keeps its traceback: it is a mistake in a script or in this package.
    """
    try:
        try:
            reason = body()
            _leave(together=True)
            return reason
        except Exception as error:
            _end(error)
            raise
    except KeyboardInterrupt as interrupt:  # which may also come while another error is on its way out
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on it ends the process at once
        _end(interrupt)
        raise


def _end(error: BaseException) -> None:
    """Leaves the other ranks, and with an error of the user's or of the world the process; returns with any other."""
    told = named(error)
    if stdout_is_unread():
        forget_stdout()
    _leave(together=False)  # first, so that the others' collectives fail at once instead of at their timeout
    if isinstance(told, MegatronError):
        _say_once(told)
        sys.exit(told.exit_code)


def named(error: BaseException) -> BaseException:
    """The error, or what it means to a user: Ctrl-C, a log that nobody reads, a Python without our dependencies, or a
    peer that is gone (gloo raises a bare RuntimeError that names its source file)."""
    if isinstance(error, KeyboardInterrupt):
        return InterruptError("interrupted (SIGINT); start again with --load to go on from the last checkpoint")
    if isinstance(error, BrokenPipeError) and stdout_is_unread():
        return StorageError("the log (stdout) has lost its reader; send it to a file, and start again with --load")
    if isinstance(error, ModuleNotFoundError):
        line = not_installed(error)
        return error if line is None else ConfigError(line)
    torch = sys.modules.get("torch")
    if torch is None or isinstance(error, MegatronError) or not isinstance(error, RuntimeError):
        return error
    text = str(error)
    if not isinstance(error, torch.distributed.DistError) and "gloo/" not in text:
        return error
    return PeerLostError(
        f"a collective failed, so another rank has ended or cannot be reached; what it said is the cause. Start again "
        f"with --load to go on from the last checkpoint ({text.splitlines()[0][:200]})"
    )


def rank_of_process() -> int:
    try:
        from megatron.distributed.launch import LaunchInfo

        return LaunchInfo.detect().rank
    except (MegatronError, ModuleNotFoundError):  # the launch itself is what is wrong, or there is no torch
        return 0


def _leave(*, together: bool) -> None:
    if "torch" in sys.modules:  # else nothing was started that could be left
        from megatron.distributed.launch import shutdown

        shutdown(barrier=together)


def _say_once(error: MegatronError) -> None:
    """Rank 0 speaks first. An error of all ranks is then over, because the launcher ends the others; whoever is still
    alive after a while has an error of its own, and says it. Who only lost its peers speaks last. Ctrl-C reaches all
    ranks, and none of them waits."""
    rank, affected = rank_of_process(), isinstance(error, PeerLostError)
    if isinstance(error, InterruptError) and rank != 0:
        return
    if affected:
        time.sleep(_AFFECTED_WAITS)
    elif rank != 0:
        time.sleep(_OTHERS_ARE_STOPPED_WITHIN)
    where = f" (rank {rank})" if rank != 0 or affected else ""
    print(f"error{where}: {error}", file=sys.stderr, flush=True)

"""Ends a run: writes exit_reason.json, prints errors as one line, sets the exit code, coordinates the ranks."""

import errno
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from megatron.distributed.comm_log import is_timeout
from megatron.errors import HangError, InterruptError, MegatronError, MemoryShortError, PeerLostError, StorageError
from megatron.utils.command_line import explained, forget_stdout, stdout_is_unread
from megatron.utils.durable import fix_of, write_atomically
from megatron.utils.log import escape_unprintable, print_lines

if TYPE_CHECKING:
    from megatron.distributed.launch import LaunchInfo

FILE = "exit_reason.json"
_LONGEST = 300
"""Longest text, in characters, shown of an error that is not a MegatronError."""


@dataclass(frozen=True)
class StopReason:
    kind: str  # "done", "planned", "exit_interval", "exit_duration", "signal", "paused", or the class of an error
    text: str
    exit_code: int = 0
    warning: str = ""  # reasons that a planned end must not overwrite


@dataclass(frozen=True)
class ExitRecord:
    """Writes `exit_reason.json` beside the checkpoints, because torchrun's exit code does not show the cause.

    Only a run that has locked the directory writes, so it never changes another run's record.
    """

    directory: Path | None
    rank: int

    def clear(self) -> None:
        """Removes the previous run's reason, which would otherwise remain if this run is killed."""
        if self.directory is not None and self.rank == 0:
            try:
                (self.directory / FILE).unlink(missing_ok=True)
            except OSError as error:
                raise _unwritable(self.directory, error) from error

    def ended(self, reason: StopReason, iteration: int) -> None:
        """Writes a planned end. Call it on every rank; rank 0 writes."""
        if self.rank == 0:
            self._write(reason, iteration=iteration)

    def failed(self, error: BaseException) -> None:
        """Writes the error that ends this rank. A PeerLostError does not overwrite its cause."""
        if self.directory is None or (isinstance(error, PeerLostError) and (self.directory / FILE).exists()):
            return
        code = error.exit_code if isinstance(error, MegatronError) else 1
        try:
            self._write(StopReason(type(error).__name__, str(error), code), rank=self.rank)
        except StorageError:
            return  # the error is printed anyway

    def _write(self, reason: StopReason, **details: int) -> None:
        if self.directory is None:
            return
        record: dict[str, str | int] = {
            "reason": reason.kind,
            "text": reason.text,
            "exit_code": reason.exit_code,
            **details,
        }
        if reason.warning:
            record["warning"] = reason.warning
        try:
            write_atomically(self.directory / FILE, [f"{json.dumps(record)}\n".encode()], sync=False)
        except OSError as error:
            raise _unwritable(self.directory, error) from error


def _unwritable(directory: Path, error: OSError) -> StorageError:
    return StorageError(f"--save {directory}: {FILE} cannot be written ({error.strerror}); {fix_of(error)}")


# Seconds. The launcher ends the other ranks once one has left, so a rank with a PeerLostError waits longest: the rank
# that is the cause must print first.
_OTHERS_ARE_STOPPED_WITHIN = 4.0
_AFFECTED_WAITS = 8.0
_LEAVES_WITHIN = 10.0
_CLAIM_IS_HELD = 6.0  # longer than the machine's other ranks wait


def run_as_program(body: Callable[[], StopReason]) -> StopReason:
    """Runs `body`. A MegatronError is printed once, as one line, and ends the process with its exit code. Any other
    exception keeps its traceback, as a bug in a script or in this package.
    """
    escape_unprintable(sys.stdout)
    try:
        try:
            reason = body()
            _leave(together=True)
            return reason
        except Exception as error:
            _end(error)
            raise
    except KeyboardInterrupt as interrupt:  # may also arrive while another error is handled
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C then ends the process at once
        _end(interrupt)
        raise


def _end(error: BaseException) -> None:
    """Leaves the process group and exits with the error's code; returns if the error is not a MegatronError. A thread
    leaves the group while the error is printed. Leaving at once makes the other ranks' collectives fail now instead of
    at their timeout. A separate thread is needed because destroying a group can hang in the failed collective.
    """
    told = as_megatron_error(error)
    if stdout_is_unread():
        forget_stdout()
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # --exit-signal-handler would make the launcher wait
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leaving = Thread(target=_leave_alone, name="leaving", daemon=True)
    leaving.start()
    if isinstance(told, MegatronError):
        _say_once(told)
    leaving.join(_LEAVES_WITHIN)
    code = told.exit_code if isinstance(told, MegatronError) else 1
    if leaving.is_alive():
        if not isinstance(told, MegatronError):
            traceback.print_exception(error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    if isinstance(told, MegatronError):
        sys.exit(code)


_WAY_ON = "start again with --load to continue from the last checkpoint"


def as_megatron_error(error: BaseException, way_on: str = _WAY_ON) -> BaseException:
    """Returns the MegatronError that explains an exception to a user, or the exception itself. It explains Ctrl-C, a
    closed stdout, a missing dependency, too little memory, and a lost or stuck peer (a RuntimeError of gloo).
    `way_on`: how to continue after that."""
    if isinstance(error, KeyboardInterrupt):
        return InterruptError(f"interrupted (SIGINT); {str(error) or 'start the same command again'}")
    if isinstance(error, BrokenPipeError) and stdout_is_unread():
        return StorageError("the log (stdout) has lost its reader; send it to a file, and start again with --load")
    if (told := explained(error)) is not None:
        return told
    if is_memory_short(error):
        return MemoryShortError(
            f"out of memory: {in_one_line(error)}. Lower --micro-batch-size, add --recompute-activations, or split the "
            "model over more ranks (--tensor-model-parallel-size); --dry-run prints what a configuration needs"
        )
    torch = sys.modules.get("torch")
    if torch is None or isinstance(error, MegatronError) or not isinstance(error, RuntimeError):
        return error
    text = str(error)
    if not isinstance(error, torch.distributed.DistError) and not any(words in text for words in _GLOO_SAYS):
        return error
    first = text.splitlines()[0][:200]
    if is_timeout(error):
        return HangError(
            f"a collective did not end within --distributed-timeout-minutes ({first}), so another rank is stuck or "
            f"cannot be reached; {way_on}"
        )
    return PeerLostError(
        f"a collective failed ({first}), so another rank has ended or cannot be reached: its error has the cause; "
        f"{way_on}"
    )


_GLOO_SAYS = ("gloo/", "Application timeout caused pair closure")
"""Texts that identify gloo's errors, which have no class: a path of its source, or the message after a timeout."""


def is_memory_short(error: BaseException) -> bool:
    """True for the out-of-memory errors of Python, of the accelerator and of torch's CPU allocator (a RuntimeError)."""
    kinds: tuple[type[BaseException], ...] = (MemoryError,)
    if (torch := sys.modules.get("torch")) is not None:
        kinds += (torch.OutOfMemoryError,)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def in_one_line(error: BaseException) -> str:
    """Formats an error as `ValueError: its text (script.py, line 12)`, with the innermost frame of the user's code."""
    text = " ".join(str(error).split())[:_LONGEST]
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if "site-packages" not in frame.filename] or list(frames)
    where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def rank_of_process() -> int:
    launch = _launch_of_process()
    return 0 if launch is None else launch.rank


def _launch_of_process() -> "LaunchInfo | None":
    try:
        from megatron.distributed.launch import LaunchInfo

        return LaunchInfo.detect()
    except (MegatronError, ModuleNotFoundError):  # the launch itself is wrong, or torch is missing
        return None


def _say_first_of_machine(error: MegatronError, launch: "LaunchInfo") -> None:
    """Prints an error unless another rank of this machine has printed the same one. The printing rank binds an abstract
    socket name for a while; other ranks with this error find it taken. The machine's first rank tries first."""
    if launch.local_rank != 0:
        time.sleep(_OTHERS_ARE_STOPPED_WITHIN)
    key = hashlib.sha256(f"{os.getuid()} {launch.master_port} {error.lines}".encode()).hexdigest()[:32]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(f"\0megatron-error-{key}")
        except OSError as taken:
            if taken.errno == errno.EADDRINUSE:
                return
        _print(error, launch.rank, named=launch.rank != 0)
        time.sleep(_CLAIM_IS_HELD)


def _print(error: MegatronError, rank: int, *, named: bool) -> None:
    where = f" (rank {rank})" if named else ""
    print_lines([f"error{where}: {line}" for line in error.lines], sys.stderr)


def _leave(*, together: bool) -> None:
    if "torch" in sys.modules:  # else there is no process group to leave
        from megatron.distributed.launch import shutdown

        shutdown(barrier=together)


def _leave_alone() -> None:
    with suppress(Exception):  # the error being printed matters more
        _leave(together=False)


def _say_once(error: MegatronError) -> None:
    """Prints the error, once if all ranks have it. Rank 0 prints first, and torchrun then ends the others. A rank still
    alive after a while prints its own error. Without torchrun, the first failing rank of each machine prints. A rank
    with a PeerLostError prints last. Ctrl-C reaches all ranks: only rank 0 prints, and no rank waits."""
    launch, common = _launch_of_process(), not isinstance(error, (InterruptError, PeerLostError))
    if launch is not None and launch.launcher in ("environment", "slurm") and launch.local_world_size > 1 and common:
        _say_first_of_machine(error, launch)
        return
    rank, affected = rank_of_process(), isinstance(error, PeerLostError)
    if isinstance(error, InterruptError) and rank != 0:
        return
    if affected:
        time.sleep(_AFFECTED_WAITS)
    elif rank != 0:
        time.sleep(_OTHERS_ARE_STOPPED_WITHIN)
    _print(error, rank, named=rank != 0 or affected)

"""Watches the ranks of a run by their heartbeats: if a rank is lost, the others name it and end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.distributed.flight_recorder import last_entries
from megatron.distributed.heartbeat import Heartbeat, by_sigterm
from megatron.distributed.sigterm import on_sigterm
from megatron.engine import Engine
from megatron.errors import HangError, MegatronError, PeerLostError, TerminatedError
from megatron.training.assemble import Parts
from megatron.training.exit import ExitRecord, as_megatron_error
from megatron.training.initialize import Run
from megatron.utils.log import print_line


@dataclass
class Position:
    """Iteration and phase of this rank, read by the heartbeat's thread."""

    parts: Parts | None = None

    def __call__(self) -> tuple[int, str]:
        if self.parts is None:
            return 0, "start"
        engine = self.parts.engine
        return self.parts.progress.iteration, engine.timers.current if isinstance(engine, Engine) else ""


@contextmanager
def watched(run: Run, record: ExitRecord) -> Iterator[Position]:
    """Wraps a rank's work. SIGTERM ends it with a message and a record, as does the loss of another rank if
    --heartbeat-timeout-seconds is set."""
    position, patience = Position(), run.config.runtime.heartbeat_timeout_seconds

    def end(error: MegatronError, speaks: bool) -> None:
        record.failed(error)
        if speaks:
            where = f" (rank {run.launch.rank})" if run.launch.world_size > 1 else ""
            print_line(f"error{where}: {error}", sys.stderr)
            if isinstance(error, HangError) and (entries := last_entries()):
                print_line(f"its last collectives: {'; '.join(entries)}", sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()

    # With --exit-signal-handler the loop handles the signal from its first step to its last.
    if run.launch.world_size == 1 or not patience:
        with on_sigterm(lambda: end(TerminatedError(by_sigterm(position())), True)):
            yield position
        return
    limit = 60.0 * run.config.runtime.distributed_timeout_minutes
    heartbeat = Heartbeat(run.launch, run.parallel.comm_log, position, end, patience=patience, limit=limit)
    heartbeat.start()
    with on_sigterm(heartbeat.asked_to_end):
        try:
            yield position
        except BaseException as error:
            told = as_megatron_error(error)
            if isinstance(told, (PeerLostError, HangError)):
                heartbeat.explain()
            heartbeat.fail(f"{type(told).__name__}: {told}".splitlines()[0])
            raise
        heartbeat.leave()

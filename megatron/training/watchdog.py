"""Watches the ranks of a training run by their heartbeats: a rank that is lost is named, and the others end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from megatron.distributed.heartbeat import Heartbeat
from megatron.distributed.sigterm import on_sigterm
from megatron.engine import Engine
from megatron.errors import MegatronError, PeerLostError
from megatron.training.assemble import Parts
from megatron.training.exit import ExitRecord, as_megatron_error
from megatron.training.initialize import Run


@dataclass
class Position:
    """The iteration and the phase that this rank is in. The heartbeat's thread reads it."""

    parts: Parts | None = None

    def __call__(self) -> tuple[int, str]:
        if self.parts is None:
            return 0, "start"
        engine = self.parts.engine
        return self.parts.progress.iteration, engine.timers.current if isinstance(engine, Engine) else ""


@contextmanager
def watched(run: Run, record: ExitRecord) -> Iterator[Position]:
    """Wraps the work of a rank in its heartbeat, if there are several ranks and a --heartbeat-timeout-seconds."""
    position, patience = Position(), run.config.runtime.heartbeat_timeout_seconds
    if run.launch.world_size == 1 or not patience:
        yield position
        return

    def end(error: MegatronError, speaks: bool) -> None:
        record.failed(error)
        if speaks:
            print(f"error (rank {run.launch.rank}): {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()

    heartbeat = Heartbeat(run.launch, run.parallel.comm_log, position, end, patience=patience)
    heartbeat.start()
    # With --exit-signal-handler SIGTERM asks for a stop after the step, and the heartbeat goes on.
    last = nullcontext() if run.config.training.exit_signal_handler else on_sigterm(heartbeat.asked_to_end)
    with last:
        try:
            yield position
        except BaseException as error:
            told = as_megatron_error(error)
            if isinstance(told, PeerLostError):
                heartbeat.explain()
            heartbeat.fail(f"{type(told).__name__}: {told}".splitlines()[0])
            raise
        heartbeat.leave()

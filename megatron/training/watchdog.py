"""Watches the ranks of a run by their heartbeats: if a rank is lost, the others name it and end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.checkpoint.run_state import RunHistory
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
    """Iteration and phase of this rank, and the way to continue the run after a signal. Read by other threads."""

    run: Run
    history: RunHistory
    parts: Parts | None = None

    def __call__(self) -> tuple[int, str]:
        if self.parts is None:
            return 0, "start"
        engine = self.parts.engine
        return self.parts.progress.iteration, engine.timers.current if isinstance(engine, Engine) else ""

    def way_on(self, interrupted: bool = True) -> str:
        """Text that names the checkpoint from which the run can continue or, without one, the flags that save some."""
        history, settings = self.history, self.run.config.checkpoint
        trained = self()[0] - history.started_from
        if trained <= 0:
            return "start the same command again"
        saved = [step for steps in list(history.committed.values()) for step in list(steps)]
        folder = settings.save if saved else settings.load
        if found := saved or list(history.loaded.values()):
            return f"start again with --load {folder} to continue from iteration {max(found)}"
        lost = "the iteration is lost" if trained == 1 else f"the {trained} iterations are lost"
        where = "" if settings.save else "--save DIR and "
        fix = f"give {where}--save-interval 100 to save regularly"
        if settings.save and settings.save_interval:
            fix = f"give a --save-interval below {settings.save_interval} to save more often"
        if interrupted and not self.run.config.training.exit_signal_handler:
            fix += f", or {where}--exit-signal-handler to save when interrupted"
        return f"no checkpoint was saved, so {lost}; {fix}"

    @contextmanager
    def told_at_end(self) -> Iterator[None]:
        """Adds `way_on` to a KeyboardInterrupt, and turns the RuntimeError of a failed collective into a MegatronError
        with that text."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            interrupt.args = (self.way_on(),)
            raise
        except RuntimeError as error:
            told = as_megatron_error(error, self.way_on(interrupted=False))
            if isinstance(told, (PeerLostError, HangError)) and told is not error:
                raise told from error
            raise


@contextmanager
def watched(run: Run, history: RunHistory, record: ExitRecord) -> Iterator[Position]:
    """Wraps a rank's work. SIGTERM ends it with a message and a record, as does the loss of another rank if
    --heartbeat-timeout-seconds is set."""
    position, patience = Position(run, history), run.config.runtime.heartbeat_timeout_seconds

    def end(error: MegatronError, speaks: bool) -> None:
        record.failed(error)
        if speaks:
            where = f" (rank {run.launch.rank})" if run.launch.world_size > 1 else ""
            print_line(f"error{where}: {error}", sys.stderr)
            if isinstance(error, HangError) and (entries := last_entries()):
                print_line(f"last collectives of this rank: {'; '.join(entries)}", sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()

    # With --exit-signal-handler the loop handles the signal from its first step to its last.
    if run.launch.world_size == 1 or not patience:
        ended = on_sigterm(lambda: end(TerminatedError(by_sigterm(position(), position.way_on())), True))
        with ended, position.told_at_end():
            yield position
        return
    limit = 60.0 * run.config.runtime.distributed_timeout_minutes
    heartbeat = Heartbeat(
        run.launch, run.parallel.comm_log, position, end, patience=patience, limit=limit, way_on=position.way_on
    )
    heartbeat.start()
    with on_sigterm(heartbeat.asked_to_end):
        try:
            with position.told_at_end():
                yield position
        except BaseException as error:
            told = as_megatron_error(error)
            if isinstance(told, (PeerLostError, HangError)):
                heartbeat.explain()
            heartbeat.fail(f"{type(told).__name__}: {told}".splitlines()[0])
            raise
        heartbeat.leave()

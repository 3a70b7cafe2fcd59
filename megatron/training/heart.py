"""The heartbeat of a training run: from which step it beats, and what is said and left behind when it stops another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from megatron.distributed.heartbeat import Heartbeat
from megatron.distributed.last_words import last_words
from megatron.errors import MegatronError, PeerLostError
from megatron.training.assemble import Parts
from megatron.training.exit_reason import ExitRecord
from megatron.training.initialize import Run
from megatron.training.process import named


@dataclass
class Place:
    """Where this rank is. Read by another thread."""

    parts: Parts | None = None

    def __call__(self) -> tuple[int, str]:
        if self.parts is None:
            return 0, "start"
        trainer = self.parts.fitting
        return self.parts.progress.iteration, "" if trainer is None else trainer.timers.current


@contextmanager
def beating(run: Run, record: ExitRecord) -> Iterator[Place]:
    """Around the work of several ranks: one that is lost is named by the others, who end."""
    place, patience = Place(), run.config.runtime.heartbeat_timeout_seconds
    if run.launch.world_size == 1 or not patience:
        yield place
        return

    def end(error: MegatronError, speaks: bool) -> None:
        record.failed(error)
        if speaks:
            print(f"error (rank {run.launch.rank}): {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()

    heart = Heartbeat(run.launch, run.parallel.operations, place, end, patience=patience)
    heart.start()
    # With --exit-signal-handler SIGTERM is a wish to stop at the end of the step, and the heart goes on beating.
    last = nullcontext() if run.config.training.exit_signal_handler else last_words(heart.asked_to_end)
    with last:
        try:
            yield place
        except BaseException as error:
            told = named(error)
            if isinstance(told, PeerLostError):
                heart.explain()
            heart.fail(f"{type(told).__name__}: {told}".splitlines()[0])
            raise
        heart.leave()

"""When a run stops before its last iteration, and how all ranks agree on it."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from megatron.distributed.collectives import all_reduce
from megatron.training.exit import StopReason
from megatron.training.initialize import Run
from megatron.utils.device import ToHost

_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalFlag:
    """Notes that a signal came; the loop looks at it between two steps.

    A second Ctrl-C ends the process at once. A signal that is ignored (a job in a script's background) stays ignored.
    What listens to signals in another thread (`on_sigterm`) does not hear them meanwhile.
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self.received: int = 0
        wanted = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._remember) for number in wanted}
        # Last here and first in `restore`: a signal in between is heard twice and ends the run; it is never lost.
        self._takes_over = signal.SIGTERM in self._previous  # else who listens to SIGTERM goes on doing so
        self._listener = signal.set_wakeup_fd(-1) if self._takes_over else -1

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def restore(self) -> None:
        if self._takes_over:
            signal.set_wakeup_fd(self._listener, warn_on_full_buffer=False)
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class StopConditions:
    """Asked once after every iteration. Clocks and signals differ between ranks: one rank with a reason is enough.

    What the ranks exchange is read at once, or where steps are asynchronous (`later`) after the next iteration, as a
    step's outcome is: nobody waits for the device, and all ranks stop one step later.
    """

    def __init__(self, run: Run, *, later: bool) -> None:
        self._run, self._config, self._later = run, run.config.training, later
        self._exchanged: ToHost | None = None
        """By the last iteration: [the largest signal number, 1 if the time of a rank is up]."""
        config = self._config
        stopping = _STOP if config.exit_signal is None else (signal.Signals[config.exit_signal],)
        self._signals = SignalFlag(stopping) if config.exit_signal_handler else None

    def reason(self, iteration: int) -> StopReason | None:
        config = self._config
        if config.exit_interval and iteration % config.exit_interval == 0:
            return StopReason("exit_interval", f"--exit-interval {config.exit_interval}")
        signalled, timed_out = self._of_any_rank()
        if signalled:
            return StopReason("signal", signal.Signals(signalled).name)
        if timed_out:
            return StopReason("exit_duration", f"--exit-duration-in-mins {config.exit_duration_in_mins}")
        return None

    def _of_any_rank(self) -> tuple[int, bool]:
        """(the signal that any rank received or 0, whether the time of any rank is up)."""
        minutes = self._config.exit_duration_in_mins
        if self._signals is None and minutes is None:
            return 0, False
        mine = [
            float(self._signals.received) if self._signals is not None else 0.0,
            float(minutes is not None and time.monotonic() - self._run.started > minutes * 60),
        ]
        # Filled on the device: a copy from the host would wait for it.
        flags = torch.stack([torch.full((), number, device=self._run.device) for number in mine])
        before, self._exchanged = self._exchanged, ToHost(all_reduce(flags, self._run.parallel.world, op="max"))
        readable = before if self._later else self._exchanged
        if readable is None:
            return 0, False
        with self._run.parallel.comm_log.read_back("reading whether a rank is to stop"):
            signalled, timed_out = readable.values()
        return int(signalled), bool(timed_out)

    def close(self) -> None:
        if self._signals is not None:
            self._signals.restore()

"""Decides when a run stops before its last iteration; all ranks agree."""

import signal
import time

import torch

from megatron.distributed.collectives import all_reduce
from megatron.training.exit import StopReason
from megatron.training.initialize import Run
from megatron.training.signals import SignalFlag, stopping_signals
from megatron.utils.device import ToHost


class StopConditions:
    """Reasons to stop, queried once after every iteration. Clocks and signals differ between ranks, so the ranks
    all-reduce their flags: one rank with a reason stops all. With `later` (asynchronous steps), the flags are read
    after the next iteration. This avoids a host sync, and all ranks stop one step later.
    """

    def __init__(self, run: Run, *, later: bool) -> None:
        self._run, self._config, self._later = run, run.config.training, later
        self._exchanged: ToHost | None = None
        """Flags exchanged in the last iteration: [the largest signal number, 1 if a rank's time is up]."""
        signals = stopping_signals(self._config)
        self._signals = SignalFlag(signals) if signals else None

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
        """Returns (a signal that some rank received, or 0; True if the time of any rank is up)."""
        minutes = self._config.exit_duration_in_mins
        if self._signals is None and minutes is None:
            return 0, False
        mine = [
            float(self._signals.received) if self._signals is not None else 0.0,
            float(minutes is not None and time.monotonic() - self._run.started > minutes * 60),
        ]
        # Filled on the device: a copy from the host would wait for the device.
        flags = torch.stack([torch.full((), number, device=self._run.device) for number in mine])
        before, self._exchanged = self._exchanged, ToHost(all_reduce(flags, self._run.parallel.world, op="max"))
        readable = before if self._later else self._exchanged
        if readable is None:
            return 0, False
        with self._run.parallel.comm_log.read_back("reading whether a rank is to stop"):
            signalled, timed_out = readable.values()
        return int(signalled), bool(timed_out)

    def listen_until_exit(self, earlier: int) -> None:
        """Handles signals until the process has ended. `earlier`: the signal received while the run started, or 0."""
        if self._signals is not None:
            self._signals.received = self._signals.received or earlier
            self._signals.stay()

    def close(self) -> None:
        if self._signals is not None:
            self._signals.restore()

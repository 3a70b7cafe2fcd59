"""Signals that ask a run to save and stop (--exit-signal-handler)."""

import atexit
import signal
from types import FrameType

from megatron.config.sections.training import TrainingConfig

_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_ENDS_AT_ONCE = (signal.SIGTERM, signal.SIGINT)  # they end the run at once until the loop begins


def stopping_signals(config: TrainingConfig) -> tuple[signal.Signals, ...]:
    """Signals of --exit-signal-handler; none without it."""
    if not config.exit_signal_handler:
        return ()
    return _STOP if config.exit_signal is None else (signal.Signals[config.exit_signal],)


def noted_while_starting(config: TrainingConfig) -> "SignalFlag":
    """Records stopping signals until the loop begins, because their default action kills the run without a message.
    SIGTERM and SIGINT are not recorded: until then they end the run at once."""
    flag = SignalFlag(tuple(number for number in stopping_signals(config) if number not in _ENDS_AT_ONCE))
    flag.stay()
    return flag


class SignalFlag:
    """Records a signal; the loop reads it between two steps.

    A second Ctrl-C ends the process at once. A signal that the process ignores (as in a script's background job)
    stays ignored. If SIGTERM is recorded, `on_sigterm` does not receive it meanwhile.
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self.received: int = 0
        self._stays = self._ended = False
        wanted = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._remember) for number in wanted}
        # The listener is removed after the handlers are set, and put back before they are reset. A signal in between
        # reaches both and ends the run, but no signal is lost.
        self._takes_over = signal.SIGTERM in self._previous  # else an existing listener keeps receiving SIGTERM
        self._listener = signal.set_wakeup_fd(-1) if self._takes_over else -1

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGTERM and self._ended:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stay(self) -> None:
        """Keeps the signals handled until the process has ended: a signal after the last step must not turn a finished
        run into a killed one. A second SIGTERM then ends the process."""
        self._stays = True
        # At exit Python restores the default action of handled signals, but not of ignored ones.
        atexit.register(self._ignore)

    def _ignore(self) -> None:
        for number in self._previous:
            if signal.getsignal(number) == self._remember:
                signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        self._ended = True
        if self._stays:
            return
        if self._takes_over:
            signal.set_wakeup_fd(self._listener, warn_on_full_buffer=False)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

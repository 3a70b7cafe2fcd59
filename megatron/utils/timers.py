"""Wall-clock timers for the phases of a step.

On an accelerator they measure when work was launched, not when it finished.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function


class Timers:
    """Named stopwatches; `elapsed` gives the seconds since the last reset."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.current = ""
        """The phase that runs now, for other threads to read."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, outer = time.perf_counter(), self.current
        self.current = name
        try:
            with record_function(name):  # a range in the trace of --profile
                yield
        finally:
            self.current = outer
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def elapsed(self) -> dict[str, float]:
        return dict(self._seconds)

    def reset(self) -> None:
        self._seconds.clear()


def render_times(times: list[dict[str, float]], option: str) -> str:
    """Renders Megatron's table of times in ms from the {name: seconds} of every rank. `option`: max, minmax or all."""
    names = list(dict.fromkeys(name for rank in times for name in rank))
    width = max((len(name) for name in names), default=0)
    lines = [
        {"max": "max time across ranks (ms):", "minmax": "(min, max) time across ranks (ms):"}.get(
            option, "times across ranks (ms):"
        )
    ]
    for name in names:
        values = [1000 * rank.get(name, 0.0) for rank in times]
        if option == "max":
            text = f"{max(values):.2f}"
        elif option == "minmax":
            text = f"({min(values):.2f}, {max(values):.2f})"
        else:
            text = ", ".join(f"rank {rank}: {value:.2f}" for rank, value in enumerate(values))
        lines.append(f"    {name + ' ':.<{width + 5}}: {text}")
    return "\n".join(lines)


def human_duration(seconds: float) -> str:
    """Formats a duration as 03:04:05 or 2d 03:04:05."""
    whole = int(max(0.0, seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    clock = f"{hours:02d}:{minutes:02d}:{secs:02d}"
    return f"{days}d {clock}" if days else clock

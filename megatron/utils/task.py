"""Runs work in a thread that the end of the program does not wait for."""

from collections.abc import Callable
from threading import Thread
from typing import Any


class Task:
    """Runs `work` in a thread and keeps its result or its error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="task", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # raised by `result`
            self._error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self.ended and self._error is not None

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

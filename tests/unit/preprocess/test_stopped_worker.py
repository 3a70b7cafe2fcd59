"""A stopped worker is named, and its work continues when the worker does."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from megatron.utils import pool
from megatron.utils.process import process_state


def answer(task: int, note: Callable[[Any], None]) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return 10 * task


class LetGoOn(logging.Handler):
    """Reads the log line and executes its command."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
        os.kill(int(self.told[-1].split("kill -CONT ")[1].split()[0]), signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_worker_is_named_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "TOLD_EVERY", 0.3)
    reader = LetGoOn()
    logging.getLogger(pool.__name__).addHandler(reader)
    try:
        with pool.WorkerPool(answer, 2) as workers:
            pids = [worker.process.pid for worker in workers._workers]
            answers = sorted(workers.map(iter(range(4)), described=str, noted=lambda note: None))
    finally:
        logging.getLogger(pool.__name__).removeHandler(reader)
    assert answers == [0, 10, 20, 30]
    assert reader.told and any(f"worker {pid} is stopped" in reader.told[0] for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_state_of_a_process() -> None:
    assert process_state(os.getpid()) in ("R", "S") and process_state(2**22 + 1) == ""

"""The heartbeat sees every host sync: with NCCL a hang shows there, not in a collective."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import background
from megatron.engine import engine, evaluation
from megatron.training import stopping
from megatron.utils.device import ToHost
from tests.helpers.runs import flags, make_parts

READERS = {"engine": engine, "stopping": stopping, "background": background}


def test_every_wait_of_the_host_for_its_device_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = flags(
        train_iters=3, exit_duration_in_mins=100, eval_iters=1, eval_interval=2,
        save=tmp_path, save_interval=2, async_save=True,
    )  # fmt: skip
    run, parts = make_parts(argv)
    seen: dict[str, list[str]] = {}

    def read(where: str) -> None:
        waiting = run.parallel.comm_log.waiting
        seen.setdefault(where, []).append("no wait" if waiting is None or not waiting.on_device else str(waiting))

    class Summed:
        def __init__(self, numbers: torch.Tensor) -> None:
            self.numbers = numbers

        def tolist(self) -> list[float]:
            read("evaluation")
            return self.numbers.tolist()

    def watch(name: str) -> type[ToHost]:
        class Watched(ToHost):
            def values(self) -> list[float]:
                read(name)
                return super().values()

        return Watched

    for name, module in READERS.items():
        monkeypatch.setattr(module, "ToHost", watch(name))
    sums, reduce = evaluation.sum_over_ranks, parts.engine.evaluate

    def evaluate(batches: Iterator[object], *rest: object) -> object:
        with monkeypatch.context() as within:
            within.setattr(evaluation, "sum_over_ranks", lambda *given: Summed(sums(*given)))
            return reduce(batches, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(parts.engine, "evaluate", evaluate)
    with parts:
        parts.trainer.fit()
    assert {name: texts[0].rstrip(" 123") for name, texts in seen.items()} == {
        "engine": "reading the outcome of step",
        "stopping": "reading whether a rank is to stop",
        "evaluation": "reading the loss of an evaluation",
        "background": "reading how far the ranks have saved",
    }
    assert not any("no wait" in texts for texts in seen.values())

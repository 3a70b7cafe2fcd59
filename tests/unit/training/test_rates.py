"""Tokens per second, TFLOP/s, MFU and the time left, each against separate arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import parse_args
from megatron.config.batch import BatchPlan
from megatron.model.flops import flops_per_token
from megatron.training.metrics import Throughput
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import Recorder, flags, make_parts, train_here


def test_rates_of_one_interval() -> None:
    rates = Throughput(seq_length=128, world_size=4, flops_per_token=6e9, peak_flops=1e13).rates(
        samples=50, seconds=2.0
    )
    assert rates.tokens_per_second == 3200
    assert rates.samples_per_second == 25
    assert rates.tflops_per_device == pytest.approx(3200 * 6e9 / 4 / 1e12)
    assert rates.utilisation == pytest.approx(3200 * 6e9 / 4 / 1e13)


def test_nothing_is_guessed() -> None:
    unknown_device = Throughput(seq_length=1, world_size=1, flops_per_token=1.0, peak_flops=None).rates(1, 1.0)
    assert unknown_device.tflops_per_device is not None and unknown_device.utilisation is None
    unknown_model = Throughput(seq_length=1, world_size=1, flops_per_token=None, peak_flops=1.0).rates(1, 1.0)
    assert unknown_model.tflops_per_device is None and unknown_model.utilisation is None


def records_of_rank(rank: int, size: int, argv: list[str]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=size)
    with parts:
        parts.trainer.fit()
    return records


def test_a_device_does_its_share_of_the_work() -> None:
    config = parse_args(flags())
    per_token = flops_per_token(config.model, seq_length=16, padded_vocab_size=112)
    for record in run_ranks(2, records_of_rank, 2, flags())[0]:
        assert record["tokens_per_second"] == pytest.approx(8 * 16 / record["seconds_per_iteration"])
        assert record["tflops_per_device"] == pytest.approx(record["tokens_per_second"] * per_token / 2 / 1e12)


def test_an_interval_over_a_ramp_counts_the_samples_it_took() -> None:
    """Batches of 2, 2, 4, 4, 6: the mean is samples over seconds, not the last batch over the mean time."""
    argv = flags(
        train_iters=None,
        train_samples=40,
        rampup_batch_size=[2, 2, 16],
        global_batch_size=6,
        log_interval=7,
    )
    records = train_here(argv)["records"]
    assert [r["iteration"] for r in records] == [7]
    record = records[0]
    samples = record["consumed_train_samples"]
    assert samples == 2 * 4 + 4 * 2 + 6
    seconds = 7 * record["seconds_per_iteration"]
    assert record["samples_per_second"] == pytest.approx(samples / seconds)
    assert record["eta_seconds"] > 0


def test_the_time_left_leaves_out_the_slow_first_iteration() -> None:
    _, parts = make_parts(flags(train_iters=1000, log_interval=3), hooks=[Recorder(records := [])])
    with parts:
        told = parts.trainer.reports
        result = parts.trainer.iterate()
        assert result is not None and records == []
        told._since_logged[0] = (*told._since_logged[0][:2], 1e6, 0.0)  # seconds
        for _ in range(5):
            parts.trainer.iterate()
    first, second = records
    assert first["seconds_per_iteration"] > 1e5 and first["eta_seconds"] < 1e5
    assert second["eta_seconds"] == pytest.approx(994 * second["seconds_per_iteration"])


def test_the_time_left_ends_at_zero() -> None:
    assert train_here(flags())["records"][-1]["eta_seconds"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"train_iters": 7},
        {"train_iters": None, "train_samples": 50},
        {"train_iters": None, "train_samples": 40, "rampup_batch_size": [2, 2, 16], "global_batch_size": 6},
        {"train_iters": None, "train_samples": 9, "rampup_batch_size": [2, 2, 16], "global_batch_size": 6},
    ],
)
def test_iterations_left_are_those_that_come(changes: dict[str, Any]) -> None:
    plan = BatchPlan(parse_args(flags(**changes)), dp=1)
    iteration = consumed = 0
    assert plan.iterations_left(0, 0) == plan.total_iterations
    while not plan.is_finished(iteration, consumed):
        left = plan.iterations_left(iteration, consumed)
        consumed += plan.batch_size(consumed)
        iteration += 1
        assert plan.iterations_left(iteration, consumed) == left - 1
    assert iteration == plan.total_iterations

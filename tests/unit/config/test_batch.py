"""Batch sizes and run lengths against a walk through Megatron's own rules, written out step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import RunConfig, TrainingConfig, batch_size_at, global_batch_size, train_iters, train_samples
from megatron.config.batch import data_parallel_size, num_micro_batches_at


def run(**training: object) -> RunConfig:
    return RunConfig(training=TrainingConfig(**training))  # type: ignore[arg-type]


def megatron_ramp(start: int, increment: int, samples: int, final: int, consumed: int) -> int:
    """The rule as its documentation states it: equal shares of the ramp's samples for each increment."""
    if consumed > samples:
        return final
    share = samples / ((final - start) // increment)
    return start + int(consumed / share) * increment


@given(
    start=st.integers(1, 64),
    increment=st.integers(1, 64),
    increments=st.integers(1, 50),
    samples=st.integers(1, 10**7),
    where=st.floats(0, 1.2),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_ramp_is_megatrons(start: int, increment: int, increments: int, samples: int, where: float) -> None:
    final, consumed = start + increment * increments, int(samples * where)
    config = run(
        micro_batch_size=1, global_batch_size=final, rampup_batch_size=(start, increment, samples), train_samples=1
    )
    batch = batch_size_at(config, 1, consumed)
    assert batch == megatron_ramp(start, increment, samples, final, consumed)
    assert start <= batch <= final
    assert batch_size_at(config, 1, 0) == start
    assert batch_size_at(config, 1, samples + 1) == final


def test_the_175b_ramp() -> None:
    config = run(
        micro_batch_size=1,
        global_batch_size=1536,
        rampup_batch_size=(16, 16, 5859375),
        train_samples=146484375,
    )
    assert batch_size_at(config, 8, 0) == 16
    assert num_micro_batches_at(config, 8, 0) == 2
    assert batch_size_at(config, 8, 5859376) == 1536
    iterations = consumed = 0
    while consumed <= 5859375:
        consumed += batch_size_at(config, 8, consumed)
        iterations += 1
    assert train_iters(config, 8) == iterations + (146484375 - consumed) // 1536


@pytest.mark.parametrize("samples", [0, 1, 15, 16, 17, 100, 1000])
def test_a_run_never_takes_more_samples_than_asked(samples: int) -> None:
    config = run(
        micro_batch_size=1, global_batch_size=64, rampup_batch_size=(16, 16, 200), train_samples=samples or None
    )
    iterations, consumed = 0, 0
    while samples and consumed + batch_size_at(config, 1, consumed) <= samples:
        consumed += batch_size_at(config, 1, consumed)
        iterations += 1
    assert train_iters(config, 1) == iterations


def test_a_ramp_that_starts_at_its_end_or_takes_no_samples() -> None:
    for ramp in ((8, 4, 100), (4, 4, 0)):
        config = run(micro_batch_size=1, global_batch_size=8, rampup_batch_size=ramp, train_samples=80)
        assert batch_size_at(config, 1, 0) == 8
        assert train_iters(config, 1) == 10


def test_sizes_without_a_ramp() -> None:
    by_iterations = run(micro_batch_size=4, train_iters=10)
    assert global_batch_size(by_iterations, 3) == 12
    assert (train_iters(by_iterations, 3), train_samples(by_iterations, 3)) == (10, 120)
    by_samples = run(micro_batch_size=4, global_batch_size=24, train_samples=100)
    assert (train_iters(by_samples, 3), train_samples(by_samples, 3)) == (4, 100)
    assert num_micro_batches_at(by_samples, 3, 0) == 2
    assert (train_iters(run(micro_batch_size=4), 3), train_samples(run(micro_batch_size=4), 3)) == (0, 0)
    assert data_parallel_size(by_samples, 6) == 6

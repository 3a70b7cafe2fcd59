"""Batch sizes and run lengths compared with Megatron's own rules, written out step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import BatchPlan, RunConfig, TrainingConfig
from megatron.config.batch import parse_schedule
from megatron.errors import ConfigError


def run(**training: object) -> RunConfig:
    return RunConfig(training=TrainingConfig(**training))  # type: ignore[arg-type]


def megatron_ramp(start: int, increment: int, samples: int, final: int, consumed: int) -> int:
    """The ramp's documented rule: equal shares of the ramp's samples for each increment."""
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
    batch = BatchPlan(config, 1).batch_size(consumed)
    assert batch == megatron_ramp(start, increment, samples, final, consumed)
    assert start <= batch <= final
    assert BatchPlan(config, 1).batch_size(0) == start
    assert BatchPlan(config, 1).batch_size(samples + 1) == final


def test_the_175b_ramp() -> None:
    config = run(
        micro_batch_size=1,
        global_batch_size=1536,
        rampup_batch_size=(16, 16, 5859375),
        train_samples=146484375,
    )
    assert BatchPlan(config, 8).batch_size(0) == 16
    assert BatchPlan(config, 8).micro_batches(16) == 2
    assert BatchPlan(config, 8).batch_size(5859376) == 1536
    iterations = consumed = 0
    while consumed <= 5859375:
        consumed += BatchPlan(config, 8).batch_size(consumed)
        iterations += 1
    assert BatchPlan(config, 8).total_iterations == iterations + (146484375 - consumed) // 1536


@pytest.mark.parametrize("samples", [0, 1, 15, 16, 17, 100, 1000])
def test_a_run_never_takes_more_samples_than_asked(samples: int) -> None:
    config = run(
        micro_batch_size=1, global_batch_size=64, rampup_batch_size=(16, 16, 200), train_samples=samples or None
    )
    iterations, consumed = 0, 0
    while samples and consumed + BatchPlan(config, 1).batch_size(consumed) <= samples:
        consumed += BatchPlan(config, 1).batch_size(consumed)
        iterations += 1
    assert BatchPlan(config, 1).total_iterations == iterations


def test_a_ramp_that_starts_at_its_end_or_takes_no_samples() -> None:
    for ramp in ((8, 4, 100), (4, 4, 0)):
        config = run(micro_batch_size=1, global_batch_size=8, rampup_batch_size=ramp, train_samples=80)
        assert BatchPlan(config, 1).batch_size(0) == 8
        assert BatchPlan(config, 1).total_iterations == 10


def test_sizes_without_a_ramp() -> None:
    by_iterations = BatchPlan(run(micro_batch_size=4, train_iters=10), 3)
    assert by_iterations.final_batch_size == 12
    assert (by_iterations.total_iterations, by_iterations.train_samples) == (10, 120)
    by_samples = BatchPlan(run(micro_batch_size=4, global_batch_size=24, train_samples=100), 3)
    assert (by_samples.total_iterations, by_samples.train_samples) == (4, 100)
    assert by_samples.micro_batches(by_samples.batch_size(0)) == 2
    endless = BatchPlan(run(micro_batch_size=4), 3)
    assert (endless.total_iterations, endless.train_samples) == (0, 0)
    assert BatchPlan.on(by_samples.config, 6).dp == 6


SCHEDULE = ("0:4", "1K:8", "3K:16")


def scheduled(train_samples: int = 1000) -> BatchPlan:
    """Sequences of 16 tokens: 8 samples a step from sample 63 on, 16 from sample 188 on."""
    config = run(micro_batch_size=2, step_batch_size_schedule=SCHEDULE, train_samples=train_samples)
    return BatchPlan(replace(config, data=replace(config.data, seq_length=16)), 2)


def test_a_schedule_by_tokens() -> None:
    plan = scheduled()
    assert [plan.batch_size(n) for n in (0, 62, 63, 187, 188, 10**9)] == [4, 4, 8, 8, 16, 16]
    assert plan.final_batch_size == plan.evaluation_batch_size == 16 and plan.train_samples == 1000


@pytest.mark.parametrize("samples", (1, 4, 60, 63, 64, 65, 100, 187, 188, 190, 199, 200, 1000, 1007))
@pytest.mark.parametrize("consumed", (0, 4, 64, 72, 192, 208))
def test_the_steps_left_of_a_schedule_are_those_that_are_taken(samples: int, consumed: int) -> None:
    plan, at, steps = scheduled(samples), consumed, 0
    while not plan.is_finished(steps, at):
        at += plan.batch_size(at)
        steps += 1
    assert plan.iterations_left(0, consumed) == steps


def test_a_schedule_of_years_is_counted_at_once() -> None:
    config = run(
        micro_batch_size=4, step_batch_size_schedule=("0:384", "200B:768", "400B:1152"), train_samples=19531250 * 10
    )
    plan = BatchPlan(replace(config, data=replace(config.data, seq_length=4096)), 8)
    assert plan.batch_size(48828124) == 384 and plan.batch_size(48828125) == 768
    assert plan.total_iterations == 127157 + 63578 + 84771


@pytest.mark.parametrize("words", ("1K:8", "0:8 1K", "0:8 1K:0", "0:8 2K:4 1K:8", "0:8 0:9", "0:8,1K:9", "0:8 1Q:3"))
def test_a_schedule_that_cannot_be(words: str) -> None:
    with pytest.raises(ConfigError, match=f"--step-batch-size-schedule {words}: .*as in"):
        parse_schedule(words.split())

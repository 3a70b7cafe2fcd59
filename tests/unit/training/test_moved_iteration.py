"""--override-ckpt-iteration relabels the loaded state as another iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import BatchPlan, parse_args
from megatron.errors import ConfigError
from megatron.training.settings import read_settings
from tests.equivalence.test_resume import corpus
from tests.helpers.runs import flags, same_numbers, train_here

__all__ = ["corpus"]

RAMP = {"train_iters": None, "train_samples": 70, "rampup_batch_size": [2, 2, 16], "global_batch_size": 6}
STEPS = {**RAMP, "global_batch_size": None, "rampup_batch_size": None, "step_batch_size_schedule": "0:2 100:4 300:8"}
BATCHES: dict[str, dict[str, Any]] = {
    "one size": {"train_iters": 9},
    "ramp": RAMP,
    "steps": STEPS,
    "skipped": {"train_iters": 9, "iterations_to_skip": [2, 4]},
}
SAMPLES = {"train_iters": None, "train_samples": 10**16}
RATES = {"lr_warmup_iters": None, "lr_decay_style": "cosine", "min_lr": 1e-4, "weight_decay": 0.0}


def settings_of(batches: str, corpus: str) -> dict[str, Any]:
    of_data = {"mock_data": None, "data_path": corpus, "tokenizer_type": "NullTokenizer", "vocab_size": 96}
    plain = {"attention_dropout": 0, "hidden_dropout": 0}  # its random states are those of the loaded step
    return {**BATCHES[batches], **RATES, **of_data, **plain}


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize(("saved", "moved"), [(3, 6), (5, 1), (3, 0)])
def test_data_and_rates_are_those_of_that_iteration(
    tmp_path: Path, corpus: str, batches: str, saved: int, moved: int
) -> None:
    """A rate of almost 0 keeps the weights, so a loss shows the samples that gave it."""
    settings = {**settings_of(batches, corpus), "lr": 1e-30, "min_lr": 1e-31}
    whole = {r["iteration"]: same_numbers(r) for r in train_here(flags(**settings))["records"]}
    train_here(flags(**settings, save=tmp_path / "a", exit_interval=saved))
    again = train_here(flags(**settings, load=tmp_path / "a", override_ckpt_iteration=moved))
    found = {r["iteration"]: same_numbers(r) for r in again["records"]}
    assert found.keys() == {iteration for iteration in whole if iteration > moved}
    for iteration, record in found.items():
        assert record == whole[iteration], iteration
    assert len({record["learning_rate"] for record in found.values()}) > 1, "the rates tell iterations apart"
    if batches != "one size" and batches != "skipped":
        assert len({record["global_batch_size"] for record in whole.values()}) > 1


def test_weights_moments_and_random_states_are_the_saved_ones(tmp_path: Path) -> None:
    """Relabelling with its own iteration changes nothing."""
    train_here(flags(save=tmp_path / "a", exit_interval=3))
    plain = train_here(flags(load=tmp_path / "a"))
    moved = train_here(flags(load=tmp_path / "a", override_ckpt_iteration=3))
    assert [same_numbers(r) for r in moved["records"]] == [same_numbers(r) for r in plain["records"]]
    for name, expected in plain["weights"].items():
        assert torch.equal(moved["weights"][name], expected), name


def test_samples_are_asked_for_up_to_the_end(tmp_path: Path) -> None:
    """The saved run took half as many per iteration."""
    train_here(flags(save=tmp_path, global_batch_size=4, exit_interval=3))
    changes = {"train_iters": 9, "override_opt_param_scheduler": True}
    again = train_here(flags(load=tmp_path, override_ckpt_iteration=6, **changes))
    assert [r["consumed_train_samples"] for r in again["records"]] == [56, 64, 72]


@pytest.mark.parametrize("changes", BATCHES.values(), ids=BATCHES)
def test_samples_after_are_counted_step_by_step(changes: dict[str, Any]) -> None:
    plan = BatchPlan.on(parse_args(flags(**changes)), 1)
    consumed = moving = 0
    for iteration in range(30):
        assert plan.samples_after(iteration) == consumed
        assert plan.schedule_samples_after(iteration) == moving
        size = plan.batch_size(consumed)
        consumed += size
        moving += size if iteration + 1 not in changes.get("iterations_to_skip", ()) else 0


def test_a_long_schedule_is_not_walked() -> None:
    long = {"step_batch_size_schedule": "0:2 900000B:4", "global_batch_size": None, **SAMPLES}
    assert BatchPlan.on(parse_args(flags(**long)), 1).samples_after(10**14) > 10**14


def steps_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if "iter_" in entry.name}


@pytest.mark.parametrize(
    ("loaded", "moved", "kept", "set_aside"),
    [
        (6, 3, {2}, {4, 6}),  # the loaded one as well: its number is still to come
        (6, 6, {2, 4, 6}, set()),
        (6, 8, {2, 4, 6}, set()),
        (2, 5, {2}, {4, 6}),
    ],
)
def test_steps_of_the_other_count_are_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loaded: int, moved: int, kept: set[int], set_aside: set[int]
) -> None:
    folder, settings = tmp_path / "run", {"train_iters": 10, "save_interval": 2}
    train_here(flags(**settings, save=folder, exit_interval=6))
    capsys.readouterr()
    step = {"ckpt_step": loaded} if loaded != 6 else {}
    train_here(flags(**settings, save=folder, load=folder, override_ckpt_iteration=moved, **step))
    said = capsys.readouterr().out
    written = {n for n in (2, 4, 6, 8, 10) if n > moved}
    names = {f"iter_{n:07d}" for n in kept | written} | {f"abandoned-iter_{n:07d}" for n in set_aside}
    assert steps_in(folder) == names
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "10"
    warned = [line for line in said.splitlines() if line.startswith("warning: --save")]
    assert len(warned) == bool(set_aside)
    assert not warned or "--override-ckpt-iteration) to resume from them" in warned[0]


def test_a_restart_with_the_same_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a restarting launcher would train the same samples for ever."""
    folder = tmp_path / "run"
    command = {"save": folder, "load": folder, "save_interval": 1, "override_ckpt_iteration": 4, "train_iters": 8}
    train_here(flags(save=folder, exit_interval=2, train_iters=8))
    first = train_here(flags(**command, exit_interval=5))
    capsys.readouterr()
    second = train_here(flags(**command))
    said = capsys.readouterr().out
    assert [r["iteration"] for r in first["records"]] == [5]
    assert [r["iteration"] for r in second["records"]] == [6, 7, 8]
    assert "iter_0000005 was saved by a run with this flag, so this run continues from there" in said
    elsewhere = train_here(flags(**{**command, "save": tmp_path / "other", "exit_interval": 5}))
    assert [r["iteration"] for r in elsewhere["records"]] == [5]  # 8 is put at 4 again


def test_a_fresh_start_says_that_nothing_was_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train_here(flags(save=tmp_path, load=tmp_path, override_ckpt_iteration=4))
    assert len(result["records"]) == 6
    assert "--override-ckpt-iteration 4: has no effect, because nothing was loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "without --load without --finetune"),
        ({"load": "x", "finetune": True}, "without --load without --finetune"),
        ({"load": "x", "override_ckpt_iteration": -1}, "--override-ckpt-iteration -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_settings(flags(**{"override_ckpt_iteration": 3, **changes}))

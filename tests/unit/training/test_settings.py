"""Settings of the run itself: each has a visible effect."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError
from megatron.optimizer import Rates
from tests.helpers.runs import flags, make_parts, pretrain_here, train_here


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of iterations 2, 4 and 6 of a run with dropout."""
    train_here(flags(save=tmp_path / "ckpt", save_interval=2, lr_decay_style="constant"))
    return tmp_path / "ckpt"


def resumed(saved: Path, **changes: Any) -> Any:
    return make_parts(flags(**{"load": saved, "lr_decay_style": "constant", "train_iters": 8, **changes}))[1]


def moments(parts: Any) -> float:
    return sum(state["exp_avg_sq"].abs().sum().item() for state in parts.engine.optimizer.state().values())


# loading


def test_ckpt_step_rewinds(saved: Path) -> None:
    parts = resumed(saved, ckpt_step=2)
    assert (parts.progress.iteration, parts.progress.consumed_train_samples) == (2, 16)


def test_finetune_takes_the_weights_and_nothing_else(saved: Path) -> None:
    whole, tuned = resumed(saved), resumed(saved, finetune=True)
    for name, weight in whole.engine.model.named_parameters():
        assert torch.equal(weight, dict(tuned.engine.model.named_parameters())[name])
    assert (tuned.progress.iteration, tuned.progress.consumed_train_samples) == (0, 0)
    assert moments(whole) > 0 and moments(tuned) == 0


def test_no_load_optim_starts_the_optimizer_anew(saved: Path) -> None:
    parts = resumed(saved, no_load_optim=True)
    assert moments(parts) == 0 and parts.progress.iteration == 6


def first_loss(parts: Any) -> float:
    result = parts.trainer.iterate()
    return float(result.lm_loss)


def test_no_load_rng_drops_out_otherwise(saved: Path) -> None:
    assert first_loss(resumed(saved)) == first_loss(resumed(saved))
    assert first_loss(resumed(saved)) != first_loss(resumed(saved, no_load_rng=True))


@pytest.mark.parametrize(
    ("leave_out", "way_out"), [("no_save_optim", "--no-load-optim"), ("no_save_rng", "--no-load-rng")]
)
def test_what_was_not_saved_is_asked_for(tmp_path: Path, leave_out: str, way_out: str) -> None:
    train_here(flags(**{leave_out: True}, save=tmp_path, save_interval=6))
    with pytest.raises(CheckpointError, match=way_out):
        make_parts(flags(load=tmp_path))
    make_parts(flags(**{way_out.strip("-").replace("-", "_"): True}, load=tmp_path))


def test_use_checkpoint_args_needs_no_shape(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"))
    argv = flags(
        **shape, vocab_size=None, load=saved, use_checkpoint_args=True, train_iters=7, lr_decay_style="constant"
    )
    assert pretrain_here(argv) == 0
    assert " iteration        7/       7 " in capsys.readouterr().out
    assert pretrain_here([*argv, "--num-layers", "3"]) == 2
    assert "--num-layers 3 (flag) and 2 of the checkpoint disagree" in capsys.readouterr().err


def test_retention_keeps_the_multiples_and_the_newest(tmp_path: Path) -> None:
    train_here(flags(save=tmp_path, save_interval=1, save_retain_interval=3))
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000005", "iter_0000006"]


@pytest.mark.parametrize("async_save", [False, True])
def test_retention_keeps_the_newest(async_save: bool, tmp_path: Path) -> None:
    settings = {"save": tmp_path, "save_interval": 1, "save_retain_last": 3, "async_save": async_save}
    train_here(flags(**settings))
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == [f"iter_000000{n}" for n in (4, 5, 6)]
    train_here(flags(**{**settings, "save": tmp_path / "both", "save_retain_last": 2, "save_retain_interval": 3}))
    assert sorted(p.name for p in (tmp_path / "both").glob("iter_*")) == [f"iter_000000{n}" for n in (3, 5, 6)]


# schedule: the printed rate is the optimizer's


def spy_rates(parts: Any) -> list[float]:
    rates: list[float] = []
    step = parts.engine.optimizer._update.step

    def spy(decision: Any, now: Rates) -> None:
        rates.append(now.lr)
        step(decision, now)

    parts.engine.optimizer._update.step = spy
    return rates


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"lr": 5e-3, "override_opt_param_scheduler": True}, 5e-3),
        ({"lr": 5e-3, "use_checkpoint_opt_param_scheduler": True}, 1e-2),
    ],
)
def test_a_changed_rate_counts_from_the_first_step(saved: Path, changes: dict[str, Any], rate: float) -> None:
    parts = resumed(saved, **changes)
    used = spy_rates(parts)
    result = parts.trainer.iterate()
    assert set(used) == {rate} == {result.learning_rate}


def test_a_changed_rate_alone_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lr is 0\.005 here and 0\.01 in the checkpoint"):
        resumed(saved, lr=5e-3)


# the process


def test_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    assert pretrain_here(flags(train_iters=1)) == 0 and asked == []
    assert pretrain_here(flags(train_iters=1, deterministic_mode=True)) == 0 and asked == [True]


@pytest.mark.parametrize(
    ("settings", "collections"),
    [
        ({}, 0),
        ({"manual_gc": True}, 2),
        ({"manual_gc": True, "no_manual_gc_eval": True}, 0),
        ({"manual_gc": True, "no_manual_gc_eval": True, "manual_gc_interval": 2}, 3),
    ],
)
def test_manual_garbage_collection(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], collections: int) -> None:
    _, parts = make_parts(flags(**settings, eval_iters=1, eval_interval=3))
    enabled: list[bool] = []
    step = parts.engine.passes.forward_step
    parts.engine.passes.forward_step = lambda *args: (enabled.append(gc.isenabled()), step(*args))[1]
    counted: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: counted.append(1))
    with parts:
        parts.trainer.fit()
    assert set(enabled) == {"manual_gc" not in settings}
    assert len(counted) == collections
    assert gc.isenabled(), "a caller's process is left as it was"


def test_the_seed_moves_weights_samples_and_dropout() -> None:
    one, same, other = (train_here(flags(seed=seed))["records"][0]["lm_loss"] for seed in (1, 1, 2))
    assert one == same != other


# TensorBoard's own switches


def tags(tmp_path: Path, **settings: Any) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, parts = make_parts(flags(tensorboard_dir=tmp_path, log_interval=100, **settings))
    with parts:
        parts.trainer.fit()
    events = EventAccumulator(str(tmp_path)).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_log_interval(tmp_path: Path) -> None:
    assert tags(tmp_path, tensorboard_log_interval=2)["lm loss"] == [2, 4, 6]


def test_tensorboard_switches_that_turn_off(tmp_path: Path) -> None:
    found = tags(tmp_path, no_log_learnig_rate_to_tensorboard=True, no_log_loss_scale_to_tensorboard=True)
    assert not {"learning-rate", "loss-scale", "batch-size", "world-size"} & set(found)
    assert found["lm loss"] == [1, 2, 3, 4, 5, 6]


def test_exit_duration_counts_from_the_start_of_the_run() -> None:
    """Loading the data counts, as for a job scheduler."""
    import dataclasses

    from megatron.config import parse_args
    from megatron.training.assemble import assemble
    from tests.helpers.runs import make_run, pretrain_gpt

    run = make_run(parse_args(flags(exit_duration_in_mins=10)))
    run = dataclasses.replace(run, started=run.started - 11 * 60)
    script = pretrain_gpt()
    with assemble(run, script.datasets_provider, script.model_provider, script.forward_step) as parts:
        assert parts.trainer.fit().kind == "exit_duration"
    assert parts.progress.iteration == 1

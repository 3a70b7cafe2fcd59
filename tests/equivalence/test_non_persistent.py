"""Non-persistent checkpoints in a second directory: a killed run resumes bit for bit from its newest step, and never
from another run's."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.training.hooks import Hook
from tests.helpers.runs import flags, make_parts, pretrain_here, train_here

SETTINGS: dict[str, Any] = {"bf16": True, "optimizer": "adam", "train_iters": 9, "hidden_dropout": 0.1}


def losses(argv: list[str]) -> dict[int, str]:
    return {record["iteration"]: repr(record["lm_loss"]) for record in train_here(argv)["records"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return losses(flags(**SETTINGS))


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    often = {"save_interval": 4, "non_persistent_save_interval": 1, "non_persistent_ckpt_type": "global"}
    return {**SETTINGS, "save": folder, "load": folder, **often, **changes}


class Killed(Hook):
    def __init__(self, after: int) -> None:
        self._after = after

    def before_iteration(self, iteration: int) -> None:
        if iteration > self._after:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_after(iteration: int, values: dict[str, Any]) -> None:
    def body() -> None:
        _, parts = make_parts(flags(**values), hooks=[Killed(iteration)])
        with parts:
            parts.trainer.fit()

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_killed_run_goes_on_from_the_newest_step(asynchronous: bool, tmp_path: Path, whole: dict[int, str]) -> None:
    values = settings(tmp_path, async_save=asynchronous)
    killed_after(7, values)
    kept = steps(tmp_path / "non_persistent")
    assert steps(tmp_path) == [4] and (kept == [7] or (asynchronous and kept and min(kept) >= 5))
    rest = losses(flags(**values))
    assert min(rest) == kept[-1] + 1 and rest == {step: whole[step] for step in rest}
    assert steps(tmp_path) == [4, 8, 9] and steps(tmp_path / "non_persistent") == [], "removed once one is newer"


def test_it_is_taken_by_the_run_that_saved_it_alone(
    tmp_path: Path, whole: dict[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, shared = tmp_path / "first", tmp_path / "second", tmp_path / "shared"
    values = settings(first, non_persistent_global_ckpt_dir=shared)
    killed_after(7, values)
    other = settings(second, non_persistent_global_ckpt_dir=shared)
    assert pretrain_here(flags(**other)) == 2
    assert f"{shared}: holds iter_0000007, which the run of --save {second} did not write" in capsys.readouterr().err
    assert steps(shared) == [7], "and it is left where it is"
    (shared / "iter_0000007/mp_rank_00/model_optim_rng.pt").write_bytes(b"")
    rest = losses(flags(**values))
    assert rest == {step: whole[step] for step in range(5, 10)}
    assert "this non-persistent checkpoint is skipped" in capsys.readouterr().out


EDGES: dict[str, tuple[dict[str, Any], int]] = {
    "no optimizer": ({"no_load_optim": True}, 7),
    "no random states": ({"no_load_rng": True}, 7),
    "neither": ({"no_load_optim": True, "no_load_rng": True}, 7),
    "the checkpoint's settings": ({"use_checkpoint_args": True}, 7),
    "a step": ({"ckpt_step": 4}, 4),
    "weights": ({"finetune": True}, 0),
}


@pytest.fixture(scope="module", params=["global", "local"])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Yields folder and settings of a run killed after its seventh iteration."""
    folder = tmp_path_factory.mktemp(request.param)
    values = settings(folder / "save", non_persistent_ckpt_type=request.param)
    values[f"non_persistent_{request.param}_ckpt_dir"] = folder / "between"
    killed_after(7, values)
    shutil.copytree(folder, folder.with_suffix(".kept"))
    return folder, values


def restored(left: tuple[Path, dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    folder, values = left
    shutil.rmtree(folder)
    shutil.copytree(folder.with_suffix(".kept"), folder)
    return folder, values


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("case", EDGES)
def test_what_a_restart_leaves_out(case: str, left: tuple[Path, dict[str, Any]], whole: dict[int, str]) -> None:
    _, values = restored(left)
    changes, start = EDGES[case]
    rest = losses(flags(**values, **changes, exit_interval=start + 1))
    assert list(rest) == [start + 1]
    weights_alone = start == 7 and "no_load_rng" not in changes
    assert (rest[start + 1] == whole[start + 1]) == (weights_alone or case == "a step"), "the loss before an update"


def test_what_trains_nothing_changes_nothing(
    left: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, values = restored(left)
    before = tree(folder)
    assert pretrain_here(flags(**values, dry_run=True)) == 0
    assert f"{values['non_persistent_ckpt_type']} non-persistent ones every 1 iterations" in capsys.readouterr().out
    assert pretrain_here(flags(**values, skip_train=True)) == 0
    assert "iter_0000007, of iteration 7" in capsys.readouterr().out
    assert tree(folder) == before
    assert pretrain_here(flags(**values, ckpt_step=7)) == 12
    assert "--ckpt-step 7:" in (told := capsys.readouterr().err) and "has no such step; it has 4" in told
    assert steps(folder / "save") == [4]


@pytest.mark.parametrize(
    ("retention", "kept"), [({"save_retain_last": 2}, [6, 8]), ({"save_retain_interval": 4}, [4, 6, 8])]
)
def test_retention_counts_persistent_steps_alone(retention: dict[str, Any], kept: list[int], tmp_path: Path) -> None:
    """Non-persistent steps do not cause the deletion of the persistent step that they continue."""
    values = settings(tmp_path, save_interval=2, **retention)
    killed_after(9, values | {"train_iters": 10})
    assert steps(tmp_path) == kept and steps(tmp_path / "non_persistent") == [9]
    assert list(losses(flags(**values | {"train_iters": 10}))) == [10]


def test_a_step_put_back_among_them_is_refused(tmp_path: Path) -> None:
    """A restart uses only steps after the loaded one; work before it would be lost each time."""
    train_here(flags(**{**SETTINGS, "save": tmp_path, "exit_interval": 3}))
    with pytest.raises(ConfigError, match="--override-ckpt-iteration 2: is before the loaded step 3"):
        train_here(flags(**settings(tmp_path, override_ckpt_iteration=2)))
    train_here(flags(**settings(tmp_path, save=tmp_path / "other", override_ckpt_iteration=2, exit_interval=4)))
    moved = settings(tmp_path, override_ckpt_iteration=4, save_interval=100)
    killed_after(6, moved)
    assert steps(tmp_path / "non_persistent") == [6]
    assert min(losses(flags(**moved))) == 7

"""The step that --load uses: the tracker decides, damage falls back with a warning, no run silently starts at 0."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.find import find_candidates
from megatron.checkpoint.run_state import RunHistory
from megatron.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.support import load, loaded_equals, make_params, make_state, save

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def three_steps(tmp_path: Path) -> Path:
    history = RunHistory("first")
    for step in (10, 20, 30):
        save(tmp_path, make_state(step, seed=step), history)
    history.close()
    return tmp_path


def step_loaded(directory: Path, **options: Any) -> tuple[int, str]:
    messages: list[str] = []
    loaded = load(directory, messages=messages, **options)
    assert loaded is not None
    return loaded.step, "\n".join(messages)


def test_tracker_decides_so_writing_another_step_rewinds(three_steps: Path) -> None:
    assert step_loaded(three_steps) == (30, "")
    (three_steps / TRACKER).write_text("10\n")
    assert step_loaded(three_steps) == (10, "")


def test_explicit_step_overrides_the_tracker(three_steps: Path) -> None:
    assert step_loaded(three_steps, step=20) == (20, "")
    with pytest.raises(CheckpointError, match=r"--ckpt-step 25: .* it has 30, 20, 10"):
        load(three_steps, step=25)


@pytest.mark.parametrize(
    "content", ["", "abc", "-1", "999999", "10\n20\n", "1\x000", "9" * 100_000, "\udcff", "1e1", "٣"]
)
def test_unusable_tracker_takes_the_newest_with_a_warning(three_steps: Path, content: str) -> None:
    (three_steps / TRACKER).write_bytes(content.encode("utf-8", "surrogateescape"))
    step, said = step_loaded(three_steps)
    assert step == 30 and "taking the newest valid checkpoint" in said
    with pytest.raises(CheckpointError, match="--ckpt-step"):
        load(three_steps, strict=True)


@pytest.mark.parametrize("kind", ["missing", "symlink", "directory"])
def test_tracker_that_is_no_file(three_steps: Path, kind: str) -> None:
    (three_steps / TRACKER).unlink()
    if kind == "symlink":
        (three_steps / "other.txt").write_text("10")
        (three_steps / TRACKER).symlink_to("other.txt")
    if kind == "directory":
        (three_steps / TRACKER).mkdir()
    step, said = step_loaded(three_steps)
    assert step == 30 and "warning" in said


def test_newest_valid_skips_damaged_ones(three_steps: Path) -> None:
    (three_steps / TRACKER).unlink()
    (three_steps / "iter_0000030/manifest.json").unlink()
    assert step_loaded(three_steps)[0] == 20


def test_damaged_step_falls_back_loudly_or_is_refused(three_steps: Path) -> None:
    file = three_steps / "iter_0000030/mp_rank_00/model_optim_rng.pt"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    for options, asked in (
        ({"strict": True}, "step 30 of latest_checkpointed_iteration.txt"),
        ({"step": 30}, "--ckpt-step 30"),
    ):
        with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt differs from what was written") as refused:
            load(three_steps, **options)
        assert f"only {asked} was tried" in str(refused.value)
        assert "to use another step, give --ckpt-step (20, 10)" in str(refused.value)
    history = RunHistory("second")
    params = make_params(3)
    messages: list[str] = []
    loaded = load(three_steps, params, history=history, messages=messages)
    assert loaded is not None and loaded.step == 20
    assert any("FALLING BACK" in message for message in messages)
    info = save(three_steps, make_state(25), history)
    assert (three_steps / "bad-iter_0000030").is_dir() and any("bad-" in message for message in info.messages)
    assert step_loaded(three_steps) == (25, "")
    history.close()


def test_all_damaged_is_an_error_not_step_zero(three_steps: Path) -> None:
    for manifest in three_steps.glob("iter_*/manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match="no valid checkpoint is left"):
        load(three_steps)


def test_rewinding_sets_the_future_aside_at_the_next_save(three_steps: Path) -> None:
    history = RunHistory("second")
    load(three_steps, step=10, history=history)
    assert sorted(p.name for p in three_steps.glob("iter_*"))[-1] == "iter_0000030"
    save(three_steps, make_state(15), history)
    assert sorted(p.name for p in three_steps.iterdir() if "iter_" in p.name) == [
        "abandoned-iter_0000020",
        "abandoned-iter_0000030",
        "iter_0000010",
        "iter_0000015",
    ]
    save(three_steps, make_state(20, seed=99), history)
    assert loaded_equals(three_steps, make_state(20, seed=99))
    (three_steps / TRACKER).unlink()
    assert step_loaded(three_steps)[0] == 20
    history.close()


def test_fresh_start_only_where_load_is_save_and_empty(tmp_path: Path) -> None:
    messages: list[str] = []
    absent = tmp_path / "absent"
    assert load(absent, save_dir=absent, messages=messages) is None
    assert len(messages) == 1 and "a fresh start" in messages[0]
    absent.mkdir()
    for name in (".lock", "notes.txt"):
        (absent / name).touch()
    (absent / ".tmp-iter_0000010.x").mkdir()
    assert load(absent, save_dir=tmp_path / "x/../absent") is None
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        load(absent, save_dir=tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        load(absent)
    with pytest.raises(CheckpointError, match="--ckpt-step 5"):
        load(absent, save_dir=absent, step=5)


@pytest.mark.parametrize("left", [TRACKER, "iter_0000010", "release"])
def test_remains_of_a_run_are_no_fresh_start(tmp_path: Path, left: str) -> None:
    if left == TRACKER:
        (tmp_path / left).write_text("10")
    else:
        (tmp_path / left).mkdir()
    with pytest.raises(CheckpointError):
        load(tmp_path, save_dir=tmp_path)


def test_a_path_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        load(tmp_path / "nowhere", save_dir=tmp_path)
    assert caught.value.exit_code == 2
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        load(tmp_path / "file", save_dir=tmp_path / "file")


def test_a_step_under_another_name_is_refused(three_steps: Path) -> None:
    shutil.rmtree(three_steps / "iter_0000030")
    shutil.copytree(three_steps / "iter_0000020", three_steps / "iter_0000030")
    step, said = step_loaded(three_steps)
    assert step == 20 and "holds step 20, but its name says step" in said


def test_linked_steps_are_not_steps(three_steps: Path, tmp_path: Path) -> None:
    (three_steps / "iter_0000030").rename(three_steps / "elsewhere")
    (three_steps / "iter_0000030").symlink_to(three_steps / "elsewhere")
    assert step_loaded(three_steps)[0] == 20


def test_names_that_are_almost_steps(tmp_path: Path) -> None:
    for name in ("iter_10", "iter_00000010", "iter_0000010.bak", ".tmp-iter_0000010.x", "iter_-000010"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        find_candidates(tmp_path)


def test_a_step_given_as_the_run_is_told_how(three_steps: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give --load \S+ --ckpt-step 20"):
        find_candidates(three_steps / "iter_0000020")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="give the directory that a run's --save names"):
        find_candidates(empty)

"""A source without readers for other programs' files finds none of their steps and rejects their models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.step_source import OWN_STEPS
from megatron.errors import ConfigError
from megatron.training.settings import read_settings
from tests.helpers.runs import flags


@pytest.mark.parametrize("ask", [OWN_STEPS.open_model, OWN_STEPS.origin, OWN_STEPS.load_model])
def test_a_model_of_another_program_is_refused(ask: Callable[[Path], object]) -> None:
    with pytest.raises(ConfigError, match="--load theirs: holds another program's model"):
        ask(Path("theirs"))


def test_settings_are_not_taken_from_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds another program's model"):
        read_settings(flags(load=tmp_path, finetune=True))


def test_no_step_is_another_programs(tmp_path: Path) -> None:
    assert OWN_STEPS.open_step(tmp_path, print) is None

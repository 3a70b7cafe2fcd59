"""Every kind of reader provides all that a load needs of a step besides its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import manifest
from megatron.checkpoint.reader import StepReader, read_and_verify
from megatron.interop.megatron_lm import open_foreign
from megatron.interop.megatron_lm.step import ClassicReader
from tests.helpers.golden_megatron import GOLDEN
from tests.unit.checkpoint.support import make_params, make_state, one_process, save

EARLIER = Path(__file__).parents[2] / "golden" / "checkpoint" / "iter_0000010"


def whole(step: Path) -> StepReader:
    return StepReader(step, manifest.read(step))


def filled(step: Path) -> StepReader:
    return read_and_verify(step, manifest.read(step), make_params(), {}, None, one_process().world)


def earlier(_: Path) -> StepReader:
    return whole(EARLIER)


def foreign(kind: str) -> Callable[[Path], StepReader]:
    def opened(_: Path) -> StepReader:
        found = open_foreign(GOLDEN / kind / "iter_0000500")
        assert found is not None
        return found.reader

    return opened


KINDS: dict[str, tuple[type[StepReader], Callable[[Path], StepReader]]] = {
    "whole": (StepReader, whole),
    "filled": (StepReader, filled),
    "earlier": (StepReader, earlier),
    "classic": (ClassicReader, foreign("23.06")),
    "core": (ClassicReader, foreign("core")),
    "torch_dist": (ClassicReader, foreign("torch_dist")),
}


def answers(reader: StepReader) -> dict[str, Any]:
    found = {
        "extra": reader.main_value("extra") or {},
        "optimizer": reader.main_value("optimizer", "extra"),
        "scheduler": reader.main_value("opt_param_scheduler"),
    }
    assert all(isinstance(value, dict) for value in found.values()), found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_load_asks_for_is_there(kind: str, tmp_path: Path) -> None:
    state = make_state()
    save(tmp_path, state)
    (step,) = tmp_path.glob("iter_*")
    of, opened = KINDS[kind]
    reader = opened(step)
    assert type(reader) is of
    found = answers(reader)
    if of is ClassicReader:
        assert found["optimizer"]["step"] >= 0 and found["scheduler"]["num_steps"] == 2000
    else:
        assert found["optimizer"] == state.optimizer_extra and found["scheduler"] == state.scheduler
        assert found["extra"] == answers(whole(step))["extra"]


def test_there_is_no_other_kind() -> None:
    assert {of for of, _ in KINDS.values()} == {StepReader, *StepReader.__subclasses__()}

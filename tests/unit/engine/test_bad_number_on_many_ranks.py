"""One line of readable length lists the ranks with a non-finite number, even if a thousand have one."""

from __future__ import annotations

import pytest
import torch

from megatron.engine import engine, nonfinite
from megatron.errors import NonFiniteError
from tests.helpers.runs import flags, make_parts


def test_a_thousand_ranks_with_a_bad_loss_are_told_in_one_readable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine, nonfinite):
        monkeypatch.setattr(module, "all_gather_json", lambda value, axis, kind: [value] * 1024)
    _, parts = make_parts(flags())
    with parts, torch.no_grad():
        next(parts.engine.model.parameters()).fill_(float("nan"))
        with torch.enable_grad(), pytest.raises(NonFiniteError) as error:
            parts.trainer.fit()
    text = str(error.value)
    assert "rank 7: samples" in text and "rank 8: samples" not in text and "; and 1016 other ranks)" in text
    assert "(also on ranks 1-1023)" in text and len(text) < 1000, text

"""The processor's peak counts the plain model's real products; where it cannot run, a reason is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.parts import peak
from benchmarks.parts.peers import Place, Shape, plain_step
from benchmarks.parts.turns import NotInstalledError

SHAPE = Shape(layers=2, hidden=32, heads=2, seq=8, vocab=48, batch=3)


def linear_operations_counted_by_torch() -> int:
    tokens = torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.seq))
    step = plain_step(SHAPE, Place(torch.float32), lambda: (tokens, tokens))
    with FlopCounterMode(display=False) as counter:
        step()
    return sum(
        count for op, count in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm")
    )


def test_operations_are_those_of_the_plain_step() -> None:
    pairs = sum(query + 1 for query in range(SHAPE.seq)) * SHAPE.batch
    causal = 6 * 2 * pairs * SHAPE.hidden * SHAPE.layers  # two products forward, four backward
    assert peak.operations(SHAPE) == linear_operations_counted_by_torch() + causal


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_step_runs(dtype: torch.dtype) -> None:
    try:
        step = peak.peak_step(SHAPE, dtype, threads=2)
    except NotInstalledError as error:
        if "is unknown" not in str(error):
            raise
        pytest.skip(str(error))
    assert step().item() == 0


def test_a_compiler_that_fails_leaves_it_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak, "_SOURCE", tmp_path / "missing.cpp")
    with pytest.raises(NotInstalledError, match="needs a C\\+\\+ compiler"):
        peak.peak_step(SHAPE, torch.float32, threads=1)


@pytest.mark.parametrize(
    ("flag", "dtype"), (("-mamx-bf16", torch.bfloat16), ("-mno-fma", torch.float32), ("-mno-fma", torch.bfloat16))
)
def test_a_processor_whose_peak_is_not_known_is_left_out(
    flag: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "_FLAGS", (*peak._FLAGS, flag))
    with pytest.raises(NotInstalledError, match=f"peak in {dtype} is unknown"):
        peak.peak_step(SHAPE, dtype, threads=1)

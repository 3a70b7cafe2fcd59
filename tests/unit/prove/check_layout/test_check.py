"""The lines that tools/check_layout.py prints before it trains."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.sources import no_other_file
from megatron.interop.source import OTHER_PROGRAMS
from megatron.prove.check_layout.check import _settings
from tests.helpers.runs import flags

PARALLEL = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("axes", "ranks", "reason"),
    [(PARALLEL, None, " (data 2 added to check the sums of data-parallel gradients; --ranks 4 for your layout)"),
     (PARALLEL, 4, ""), ({}, None, ""), ({**PARALLEL, "context_parallel_size": 2}, None, "")],
)  # fmt: skip
def test_added_ranks_are_explained(axes: dict[str, Any], ranks: int | None, reason: str, tmp_path: Path) -> None:
    options = Namespace(script=None, ranks=ranks, steps=3, plant=None, full=False, tolerance=1e-10)
    _, _, (first, *_) = _settings(options, flags(**axes), tmp_path, OTHER_PROGRAMS, no_other_file)
    assert first.endswith(f"each token's loss with its own weight{reason}")

"""A run with context parallelism, stopped and resumed with dropout, equals the one that did not stop, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.test_context_parallel import DOCUMENTS, KINDS, layout
from tests.equivalence.test_parallel_checkpoints import check_resume_and_reading


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_not_stopped(kind: str, tmp_path: Path) -> None:
    check_resume_and_reading(4, DOCUMENTS, layout(2, kind, tp=2), tmp_path)

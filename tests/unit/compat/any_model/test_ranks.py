"""Programs whose process group the engine opened leave it cleanly."""

from __future__ import annotations

import sys

import pytest

from megatron.compat.any_model import ranks
from megatron.errors import PeerLostError


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_wait_for_each_other_at_the_end_unless_an_error_ended_this_one(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    def shutdown(*, barrier: bool, **_: object) -> None:
        waits.append(barrier)
        raise PeerLostError("rank 1 is gone")

    monkeypatch.setattr(ranks, "shutdown", shutdown)
    monkeypatch.delattr(sys, "last_value", raising=False)
    if failed:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    ranks.shutdown_at_exit()
    assert waits == [not failed]

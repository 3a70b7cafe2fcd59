"""Time limits: when torch ends a collective, and when the heartbeat names the stuck rank."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megatron.config import parse_args
from megatron.training.initialize import timeout_of_collectives
from tests.helpers.runs import flags


@pytest.mark.parametrize(("device", "patience", "seconds"), [("cpu", 20, 120), ("cuda", 20, 180), ("cuda", 0, 120)])
def test_torchs_watchdog_comes_after_the_heartbeat_has_named_the_stuck_rank(
    device: str, patience: int, seconds: int
) -> None:
    """A wait on a CPU ends at the limit by itself; without heartbeats nothing else would end it."""
    config = parse_args(flags(distributed_timeout_minutes=2, heartbeat_timeout_seconds=patience))
    assert timeout_of_collectives(config, torch.device(device)) == timedelta(seconds=seconds)

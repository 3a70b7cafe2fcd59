"""Handles non-finite numbers: decides when a skipped update is an error, and finds the first of them."""

from itertools import islice

import torch

from megatron.data_parallel import TrainingStore
from megatron.distributed.meeting import spans
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import ParallelState
from megatron.optimizer import DynamicLossScaler, Optimizer

_FORGIVEN_OVERFLOWS = 2
"""Overflows in a row that are tolerated at the lowest loss scale."""


def overflows_at_the_bottom(optimizer: Optimizer, loss_scale: float, in_a_row: int) -> str | None:
    """Error text if an update was skipped although a dynamic loss scale is at its minimum, else None."""
    scaler = optimizer.scaler
    assert isinstance(scaler, DynamicLossScaler), "without a dynamic loss scale every such gradient is an error"
    if loss_scale > scaler.min_scale or in_a_row <= _FORGIVEN_OVERFLOWS:
        return None
    return f"a gradient overflows even at the loss scale {loss_scale:g}, {in_a_row} steps in a row"


def nonfinite_grads(store: TrainingStore, limit: int = 5) -> list[str]:
    """First parameters whose gradient on this rank is not finite, in the model's order."""
    return list(islice((name for name, grad in store.grads() if not torch.isfinite(grad).all()), limit))


def first_nonfinite(optimizer: Optimizer, parallel: ParallelState) -> str:
    """Text that names non-finite tensors and their ranks: parameters before gradients. A collective, because the cause
    may be on one rank only: in one stage, or in one shard of a layer."""
    store = optimizer.store
    weights = [name for name in store.names if not torch.isfinite(store.weight(name)).all()]
    mine = ("parameters", tuple(weights)) if weights else ("gradients", tuple(nonfinite_grads(store)))
    found = all_gather_json(mine, parallel.world, tuple[str, tuple[str, ...]])
    for kind in ("parameters", "gradients"):
        ranks = {rank: names for rank, (what, names) in enumerate(found) if what == kind and names}
        if ranks:
            first, *others = ranks
            whose = f" of rank {first}" if len(found) > 1 else ""
            also = f" (also on rank{'s' if others[1:] else ''} {spans(others)})" if others else ""
            return f"first non-finite {kind}{whose}: {', '.join(ranks[first][:4])}{also}"
    return ""

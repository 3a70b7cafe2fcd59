"""Mistakes that tools/check_layout.py can make on purpose, so that a user sees what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from megatron.distributed import collectives
from megatron.distributed.state import Axis, ParallelState
from megatron.engine import Batch
from megatron.errors import ConfigError
from megatron.training.assemble import Parts

Plant = Callable[[Parts], None]


def no_gradient_reduction(parts: Parts) -> None:
    """Data-parallel ranks keep their own gradients."""
    state = parts.engine.parallel
    _needs(state.dp_cp.size > 1, "no-gradient-reduction", "two ranks with different data; give --ranks N")
    _leave_out("start_all_reduce", {"dp", "cp", "dp_cp", "expert_dp"})


def no_replica_sum(parts: Parts) -> None:
    """What ranks of one model share (norms under --sequence-parallel, a tied table, shared keys) is not summed."""
    specs = parts.checkpoints.specs.values()
    mine = any(parts.engine.parallel.axis(name).size > 1 for spec in specs for name in spec.replica_axes)
    anybody = any(collectives.all_gather_object(mine, parts.engine.parallel.world))
    way = "parameters whose gradient is summed over a model's ranks; try --sequence-parallel, or tied stages"
    _needs(anybody, "no-replica-sum", way)
    parts.trainer.engine.sum_replicas = None


def one_weight_off(parts: Parts) -> None:
    """The last rank starts with one weight a millionth larger."""
    if not _is_last(parts.engine.parallel):
        return
    with torch.no_grad():
        # Not one of a row that only pads a table: these are zero.
        weight = next(p for p in parts.engine.model.parameters() if p.dim() > 1 and p.abs().max() > 0).view(-1)
        weight[weight.abs().argmax()] *= 1 + 1e-6


def lost_token(parts: Parts) -> None:
    """The last rank that reads data leaves one counted token out of each batch."""
    trainer = parts.trainer
    if not _is_last(parts.engine.parallel):
        return

    def without_one(batch: Batch) -> Batch:
        if "loss_mask" not in batch:
            raise ConfigError("--plant lost-token: the batches of this script have no loss_mask; plant something else")
        mask = batch["loss_mask"].clone()
        mask[0, 0] = 0
        return {**batch, "loss_mask": mask}

    trainer.train_batches = map(without_one, trainer.train_batches)


PLANTS: Mapping[str, Plant] = MappingProxyType(
    {
        "no-gradient-reduction": no_gradient_reduction,
        "no-replica-sum": no_replica_sum,
        "one-weight-off": one_weight_off,
        "lost-token": lost_token,
    }
)


def _is_last(state: ParallelState) -> bool:
    return state.rank == state.world.size - 1


def _needs(there: bool, plant: str, what: str) -> None:
    if not there:
        raise ConfigError(f"--plant {plant}: this layout has nothing to break so; it needs {what}")


def _leave_out(collective: str, axes: set[str]) -> None:
    """In this process, which ends with the check."""
    original = getattr(collectives, collective)

    def broken(tensor: torch.Tensor, axis: Axis, *rest: object) -> object:
        return original(tensor, Axis.single(axis.name) if axis.name in axes else axis, *rest)

    setattr(collectives, collective, broken)

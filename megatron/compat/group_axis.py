"""The ranks of a process group that the user has opened."""

from __future__ import annotations

import torch.distributed as dist

from megatron.distributed.state import Axis
from megatron.errors import ConfigError


def axis_of(group: dist.ProcessGroup | None, who: str) -> Axis:
    """All ranks if no group is given. `who` asks, for the message."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{who}: there is no process group; call torch.distributed.init_process_group('gloo') (or 'nccl') before, "
            "in every process that torchrun or mp.spawn has started"
        )
    group = group or dist.group.WORLD
    assert group is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis("dp", ranks.index(dist.get_rank()), len(ranks), ranks, group)

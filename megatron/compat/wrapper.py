"""What the wrappers of a model share that average gradients within the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from megatron.compat.arrivals import Arrivals
from megatron.data_parallel.broadcast import broadcast_parameters
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError


class AveragingWrapper(nn.Module):
    """`module` is the model; a state dict has its names behind `module.`, as torch's."""

    _arrivals: Arrivals
    _syncs = True

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.module = module
        self._dp = axis_of(group, type(self).__name__)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes inside, and their backward passes, only add up this rank's gradients."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _start_alike(self) -> None:
        """Gives all ranks the first one's parameters and buffers."""
        for tensors in (self.module.named_parameters(), self.module.named_buffers()):
            broadcast_parameters(tensors, self._dp)

    def _awaited(self) -> str:
        """The parameters whose gradients are still missing from a pass that has begun, in words."""
        awaited = {id(one) for one in self._arrivals.awaited}
        names = [name for name, one in self.module.named_parameters() if id(one) in awaited]
        return f"{', '.join(names[:4])}{' and others' if names[4:] else ''}"


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

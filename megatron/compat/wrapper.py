"""Base class of the model wrappers that average gradients within the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from megatron.compat.arrivals import Arrivals
from megatron.data_parallel.broadcast import broadcast_parameters
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError


class AveragingWrapper(nn.Module):
    """`module` is the model; names in the state dict begin with `module.`, as in torch."""

    _arrivals: Arrivals
    _syncs = True

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.module = module
        self._dp = axis_of(group, type(self).__name__)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate this rank's gradients, without reducing them."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _start_alike(self) -> None:
        """Broadcasts the first rank's parameters and buffers to all ranks."""
        for tensors in (self.module.named_parameters(), self.module.named_buffers()):
            broadcast_parameters(tensors, self._dp)

    def _awaited(self) -> str:
        """Lists by name the parameters still without a gradient in a pass that has begun."""
        awaited = {id(one) for one in self._arrivals.awaited}
        names = [name for name, one in self.module.named_parameters() if id(one) in awaited]
        return f"{', '.join(names[:4])}{' and others' if names[4:] else ''}"


def axis_of(group: dist.ProcessGroup | None, who: str) -> Axis:
    """Returns the axis of `group`, by default of all ranks. The error message begins with `who`."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{who}: there is no process group; call torch.distributed.init_process_group('gloo') (or 'nccl') first, "
            "in every process that torchrun or mp.spawn has started"
        )
    group = group or dist.group.WORLD
    assert group is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis("dp", ranks.index(dist.get_rank()), len(ranks), ranks, group)

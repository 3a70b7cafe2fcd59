"""Sends long messages between two ranks of the world, block by block, in host memory."""

from collections.abc import Callable, Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.comm_log import CommOp
from megatron.distributed.parallel_state import Axis

BLOCK_BYTES = 16 * 2**20


def stream(
    axis: Axis,
    *,
    send: Iterable[Tensor] = (),
    to: int | None = None,
    sizes: Iterable[int] = (),
    source: int | None = None,
    take: Callable[[Tensor], None] | None = None,
) -> None:
    """Sends blocks of bytes to the member `to` while receiving blocks of the given `sizes` from the member `source`.
    All members of a ring may call it at the same time."""
    for out, size in zip_longest(send, sizes):
        works, arriving = [], None
        if size is not None:
            assert source is not None
            arriving = torch.empty(size, dtype=torch.uint8)
            works.append(dist.irecv(arriving, axis.ranks[source], axis.group))
        if out is not None:
            assert to is not None
            works.append(dist.isend(out, axis.ranks[to], axis.group))
        with axis.wait(CommOp("send files", axis.name, axis.ranks)):
            for work in works:
                assert work is not None
                work.wait()
        if arriving is not None:
            assert take is not None
            take(arriving)


def block_sizes(size: int) -> list[int]:
    """Sizes of the blocks in which a file is sent."""
    return [min(BLOCK_BYTES, size - start) for start in range(0, size, BLOCK_BYTES)]

"""Finds classes of ranks that issue the same operations, so that a few ranks stand for thousands.

Data-parallel replicas run one program on different data. Shifting all ranks by whole replicas maps every group of the
layout to a group, so it is enough to prove that the programs of one replica end. If expert parallelism spans several
replicas, these together are the unit of the shift. With several instances of the optimizer, the ranks of each are
shifted among themselves, all instances alike. Instances are also shifted as a whole. If an instance is not a whole
number of units, the unit consists of whole instances.
"""

from collections.abc import Callable
from dataclasses import replace
from math import lcm

from megatron.layout import Layout
from megatron.prove.order.events import Op, Recording


def representatives(layout: Layout) -> list[int]:
    """Returns one rank of each class (tensor, context, expert and pipeline coordinate), in ascending order."""
    return sorted({representative(layout, rank) for rank in range(layout.world_size)})


def representative(layout: Layout, rank: int) -> int:
    unit, wide = _unit(layout), layout.cp * layout.dp
    tp, shared, pp = rank % layout.tp, rank // layout.tp % wide, rank // (layout.tp * wide)
    return tp + layout.tp * (shared % unit + wide * pp)


def _unit(layout: Layout) -> int:
    """Returns the number of consecutive data- and context-parallel ranks that are in different classes."""
    unit = lcm(layout.cp, layout.ep)
    return unit if layout.shard % unit == 0 else lcm(unit, layout.shard)


def others(layout: Layout, *, divided: bool = False) -> list[int]:
    """Returns ranks that are recorded besides the representatives, to check that each does what its class does. These
    are the first rank of the next replica on the first and on the last stage, and the last of all ranks. If replicas
    are `divided`, sums over a tensor-parallel group cover pieces that depend on the replica, so whole groups are
    recorded."""
    wide = layout.cp * layout.dp
    following = min(_unit(layout), wide - 1) * layout.tp
    chosen = {following, following + layout.tp * wide * (layout.pp - 1), layout.world_size - 1}
    if divided:
        chosen = {rank // layout.tp * layout.tp + place for rank in chosen for place in range(layout.tp)}
    return sorted(rank for rank in chosen if representative(layout, rank) != rank)


def difference(
    recording: Recording, model: Recording, stands_for: Callable[[int], int], *, divided: bool = False
) -> str | None:
    """Describes the first operation in which a rank differs from the representative of its class. Where replicas are
    `divided`, sizes depend on the replica."""
    ours, theirs = _program(recording, stands_for, divided), _program(model, stands_for, divided)
    for number, (one, other) in enumerate(zip(ours, theirs), 1):
        if one != other:
            return f"operation {number} is {one[1]} on rank {recording.rank} and {other[1]} on rank {model.rank}"
    if len(ours) != len(theirs):
        return f"rank {recording.rank} has {len(ours)} operations and rank {model.rank} has {len(theirs)}"
    return None


def _program(recording: Recording, stands_for: Callable[[int], int], divided: bool) -> list[tuple[str, Op]]:
    return [(recording.groups[op.group].what, _normal(op, stands_for, divided)) for op in recording.ops]


def _normal(op: Op, stands_for: Callable[[int], int], divided: bool) -> Op:
    messages = tuple(replace(message, peer=stands_for(message.peer)) for message in op.messages)
    detail = op.detail
    if op.kind in ("broadcast", "gather", "scatter", "reduce"):
        *words, root = op.detail.split()
        detail = " ".join([*words, str(stands_for(int(root)))])
    return replace(op, group="", detail=detail, messages=messages, size=0 if divided else op.size)

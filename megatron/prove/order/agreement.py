"""Checks that all members of each communicator issue the same operations, in the same order."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megatron.prove.order.events import Communicator, MessageSide, Op, Recording, Wait

_ROUTED = ("tp", "ep")
"""Axes over which ranks exchange rows for experts. The router decides the number of rows."""


def disagreements(recordings: Mapping[int, Recording], *, peers_are_real: bool = False) -> list[str]:
    """Returns a line for the first disagreement of each communicator. Recorded ranks stand for their class.

    Scripted peers send made-up counts of tokens, so sizes that depend on these are compared only with real peers.
    """
    ops = (op for each in recordings.values() for op in each.ops)
    routed = _ROUTED if not peers_are_real and any(op.kind == "all_to_all" and op.size < 0 for op in ops) else ()
    return [
        *_of_groups(recordings),
        *_of_collectives(recordings, routed),
        *_of_messages(recordings),
        *_not_waited(recordings),
    ]


def _of_groups(recordings: Mapping[int, Recording]) -> Iterator[str]:
    """Checks that the n-th group that a rank makes is also the n-th group of every other member."""
    made = {rank: [*recording.groups.values()] for rank, recording in recordings.items()}
    for rank, groups in made.items():
        for number, group in enumerate(groups):
            for member in group.ranks:
                if member not in made:
                    continue
                other = made[member][number] if number < len(made[member]) else None
                if other is None or other.name != group.name:
                    yield (
                        f"ranks create groups in different orders: number {number} is {group} on rank {rank} "
                        f"and {other or 'none'} on rank {member}"
                    )
                    return


def _of_collectives(recordings: Mapping[int, Recording], routed: Sequence[str]) -> Iterator[str]:
    asked: dict[str, dict[int, list[Op]]] = defaultdict(dict)
    for rank, recording in recordings.items():
        for name in recording.groups:
            asked[name][rank] = []
        for op in recording.ops:
            if op.is_collective:
                asked[op.group][rank].append(op)
    for name, by_rank in asked.items():
        first, *others = by_rank
        group = recordings[first].groups[name]
        for other in others:
            line = _first_difference(
                group, first, by_rank[first], other, by_rank[other], sizes=group.what not in routed
            )
            if line is not None:
                yield line
                break


def _first_difference(
    group: Communicator, a: int, of_a: list[Op], b: int, of_b: list[Op], *, sizes: bool
) -> str | None:
    for number, (ours, theirs) in enumerate(zip(of_a, of_b), 1):
        if _content(ours) != _content(theirs) or (sizes and ours.size != theirs.size):
            return f"operation {number} of {group} is {ours} on rank {a} and {theirs} on rank {b}"
    if len(of_a) == len(of_b):
        return None
    (longer, more), (shorter, fewer) = sorted([(a, of_a), (b, of_b)], key=lambda each: -len(each[1]))
    missing = more[len(fewer)]
    return f"operation {len(fewer) + 1} of {group}, {missing}, is on rank {longer} but not on rank {shorter}"


def _content(op: Op) -> tuple[object, ...]:
    return op.kind, op.dtype, op.detail


def _of_messages(recordings: Mapping[int, Recording]) -> Iterator[str]:
    """Checks the messages of each pair of ranks in order, because nccl matches them only by order. Our tags show
    whether sender and receiver mean the same message."""
    sides: dict[tuple[str, int, int], dict[str, list[MessageSide]]] = defaultdict(lambda: {"send": [], "recv": []})
    groups: dict[str, Communicator] = {}
    for rank, recording in recordings.items():
        groups |= recording.groups
        for op in recording.ops:
            for message in op.messages:
                sides[op.group, *message.way(rank)][message.side].append(message)
    for (name, sender, receiver), both in sides.items():
        if sender not in recordings or receiver not in recordings:
            continue
        for number, (sent, received) in enumerate(zip(both["send"], both["recv"]), 1):
            if (sent.size, sent.dtype, sent.tag) != (received.size, received.dtype, received.tag):
                yield (
                    f"message {number} from rank {sender} to rank {receiver} on {groups[name]}: the sender's is "
                    f"{sent}, the receiver's is {received}"
                )
                break
        else:
            if len(both["send"]) != len(both["recv"]):
                yield (
                    f"on {groups[name]} rank {sender} sends {len(both['send'])} messages to rank {receiver}, "
                    f"which receives {len(both['recv'])}"
                )


def _not_waited(recordings: Mapping[int, Recording]) -> Iterator[str]:
    for rank, recording in recordings.items():
        waited = {event.op for event in recording.events if isinstance(event, Wait)}
        left = [op for op in recording.ops if op.number not in waited and not _only_sends(op)]
        if left:
            yield f"rank {rank} never waits for {left[0]} on {recording.groups[left[0].group]}"
            return


def _only_sends(op: Op) -> bool:
    return bool(op.messages) and all(message.side == "send" for message in op.messages)

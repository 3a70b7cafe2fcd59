"""Packs conversations into samples by best fit, longest first, which leaves little padding."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packs:
    """Packs of lengths, by their indices: pack i holds members[starts[i]:starts[i + 1]]."""

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1


def pack(lengths: np.ndarray, room: int, rng: np.random.RandomState) -> Packs:
    """Packs lengths into packs of at most `room` in sum. The generator decides the order of equal lengths."""
    shuffled = rng.permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # packs by the room they have left
    rooms: list[int] = []  # the rooms that some pack has, ascending
    for member, length in zip(order.tolist(), lengths[order].tolist()):
        place = bisect_left(rooms, length)
        if place < len(rooms):
            left = rooms[place]
            found = with_room[left].pop()
            if not with_room[left]:
                rooms.pop(place)
            packs[found].append(member)
        else:
            left, found = room, len(packs)
            packs.append([member])
        left -= length
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(found)
    sizes = [len(members) for members in packs]
    members = np.fromiter((member for members in packs for member in members), dtype=np.int64, count=len(lengths))
    return Packs(members, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

"""Exchanges plain values between ranks: JSON in a tensor, decoded to the type that the receiver expects.

Object collectives of torch unpickle received data, so access to one rank's connections would mean running code on all
ranks. Here a malicious peer can at most send text that is rejected. Values are plain JSON values, dataclasses, tuples
and paths.
"""

import json
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from megatron.distributed.parallel_state import Axis
from megatron.errors import PeerLostError
from megatron.utils.typed import json_value, typed

T = TypeVar("T")

LARGEST_MESSAGE = 2**28
"""Largest message of one rank, in bytes. The package's longest, a checkpoint's tensor records, has a few million."""
_WITHOUT_LIMIT = timedelta(days=365)


def all_gather_json(value: T, axis: Axis, kind: type[T], *, after_work: bool = False) -> list[T]:
    """Gathers small values of all members, in axis order, each of type `kind`. Equal values are one object. With
    `after_work`, members arrive after file I/O, which may take longer than a collective may. The wait then has no
    limit, if the heartbeat ends it when a member is lost."""
    if axis.size == 1:
        return [value]
    group, device = axis.group, _device(axis)
    mine = _encoded(value).to(device)
    patient = after_work and axis.comm_log is not None and axis.comm_log.watched
    with axis.during("all_gather_json"):
        lengths = _all_gather(torch.tensor([len(mine)], device=device), group, axis.size, without_limit=patient)
        sizes = [_checked_length(length, axis, rank) for rank, length in enumerate(lengths.flatten().tolist())]
        padded = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
        rows = _all_gather(padded, group, axis.size).cpu().numpy()
    texts = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    values: dict[bytes, T] = {}  # most ranks send the same value
    for rank, text in enumerate(texts):
        if text not in values:
            values[text] = _decoded(text, axis, rank, kind)
    return [values[text] for text in texts]


def broadcast_json(value: T | None, axis: Axis, kind: type[T], source: int = 0) -> T:
    """Broadcasts the small value of axis rank `source`, of type `kind`, to every member."""
    if axis.size == 1:
        assert value is not None
        return value
    group, device, sends = axis.group, _device(axis), axis.rank == source
    message = _encoded(value).to(device) if sends else torch.empty(0, dtype=torch.uint8, device=device)
    with axis.during("broadcast_json"):
        length = torch.tensor([len(message)], device=device)
        dist.broadcast(length, axis.ranks[source], group)
        size = _checked_length(int(length.item()), axis, source)
        received = message if sends else message.new_empty(size)
        dist.broadcast(received, axis.ranks[source], group)
    return _decoded(received.cpu().numpy().tobytes(), axis, source, kind)


def _all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, size: int, *, without_limit: bool = False
) -> torch.Tensor:
    """Gathers a flat tensor from each member into the rows of one tensor. With a thousand members, making a tensor for
    each would take longer than receiving them."""
    gathered = tensor.new_empty(size * len(tensor))
    options = AllgatherOptions()
    if without_limit:
        options.timeout = _WITHOUT_LIMIT
    gather = getattr(group, "all_gather_single", None) or group._allgather_base  # torch before 2.13
    gather(gathered, tensor, options).wait()
    return gathered.view(size, -1)


def _device(axis: Axis) -> torch.device:
    """Device on which the group takes tensors: the host if possible."""
    if "cpu:" in dist.get_backend_config(axis.group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _encoded(value: Any) -> torch.Tensor:
    text = json.dumps(json_value(value), separators=(",", ":")).encode("ascii")
    assert len(text) <= LARGEST_MESSAGE, f"a message of {len(text)} bytes is too long"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _decoded(text: bytes, axis: Axis, rank: int, kind: type[T]) -> T:
    try:
        return typed(kind, json.loads(text))
    except (ValueError, RecursionError) as error:  # invalid text, JSON or type
        raise _refusal(axis, rank, str(error)) from None


def _checked_length(length: int, axis: Axis, rank: int) -> int:
    if not 0 < length <= LARGEST_MESSAGE:
        raise _refusal(axis, rank, f"a length of {length} bytes")
    return length


def _refusal(axis: Axis, rank: int, reason: str) -> PeerLostError:
    reason = " ".join(reason.split())[:200]
    return PeerLostError(
        f"rank {axis.ranks[rank]} sent data that is not a message of this program ({reason}). All ranks must run the "
        "same version, and no other process may reach their ports (docs/parallelism.md)"
    )

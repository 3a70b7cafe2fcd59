"""Watches one step on a fake device: host syncs, allocations and bytes moved.

A host sync fails at once and names its line; known ones are counted and answered instead. The fake device has no
values. A sync is whatever reads a number, takes a shape from data, or copies between host and device other than pinned
and non-blocking.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.distributed import messages
from tests.cluster.fake_device import CUDA, PINNED, Event, Stream, is_pinned, replace_everywhere

_REPOSITORY = Path(__file__).parents[2]
_OWN = {
    str(_REPOSITORY / "tests" / "cluster" / f"{name}.py")
    for name in ("fake_device", "fake_run", "host_waits", "unforgiving")
}
_COPIES = {"clone", "_to_copy", "cat", "stack", "contiguous"}
_READ_WITHIN = {
    "histc",
    "multinomial",
    "_linalg_check_errors",
    "_linalg_svd",
    "linalg_eig",
    "embedding_renorm_",
    "barrier",
}
"""Operations that wait for the device in their own code: kernels that check numbers or errors, and NCCL's barrier."""
_META = torch.device("meta")


class HostWait(AssertionError):
    """Raised where the host would wait for the device."""


@dataclass(frozen=True)
class Place:
    """A line of this repository and the names in its frame."""

    file: str
    line: int
    function: str
    names: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.file}:{self.function}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def here(beyond: Sequence[str] = ()) -> Place:
    """Innermost line of this repository, except the watchers' own files and those of `beyond`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{_REPOSITORY}/") and name not in _OWN and "/.venv/" not in name:
            file = str(Path(name).relative_to(_REPOSITORY))
            if file not in beyond:
                return Place(file, frame.f_lineno, _function(frame), frame.f_locals)
        frame = frame.f_back
    raise AssertionError("an operation that nothing of ours asked for")


def _function(frame: FrameType) -> str:
    """Name of the frame's function; a comprehension (before Python 3.12) or a lambda has its enclosing function's."""
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name


Answer = Callable[[Mapping[str, Any], Any], Any]
"""(names at the place, tensor that is read) -> value that the host would have read."""


@dataclass(frozen=True)
class Known:
    """A known wait, accepted until a later change removes it."""

    place: str
    why: str
    answer: Answer


@dataclass(frozen=True)
class Allocation:
    size: int
    shape: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.size} bytes {list(self.shape)} by {self.what}"


class Watch(TorchDispatchMode):
    """`weights`: the model's parameters. Allocations above `bound` bytes are kept with their place."""

    def __init__(self, known: Sequence[Known], weights: Iterable[Tensor] = (), bound: int = sys.maxsize) -> None:
        super().__init__()
        self._known, self._bound = {one.place: one for one in known}, bound
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._copies: dict[int, int] = {}
        self.waits: Counter[str] = Counter()
        self.large: list[tuple[Place, Allocation]] = []
        self.most_copied = Allocation(0, (), "nothing")
        self.moved = self.sent = self.host_bytes = self.operations = 0

    def __enter__(self) -> Watch:
        self._patch = patch = pytest.MonkeyPatch()
        patch.setattr(FakeTensor, "tolist", lambda tensor: self._read(tensor, "tolist()"))
        for name in ("__repr__", "__format__"):  # of a real tensor they show its numbers
            patch.setattr(FakeTensor, name, partialmethod(_text, self, getattr(FakeTensor, name)))
        for owner in (torch.cuda, torch.accelerator, Event, Stream):
            patch.setattr(owner, "synchronize", lambda *_: self._read(None, "synchronize()"))
        for owner in (torch.cuda, torch.accelerator):
            patch.setattr(owner, "empty_cache", lambda: self._read(None, "empty_cache()"))
        replace_everywhere(patch, messages.all_gather_json, partial(_meets, self, messages.all_gather_json))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:
            kwargs["device"] = CUDA  # C++ asked a tensor for its device
        name = func.overloadpacket.__name__
        if (tensor := _waits(func, name, args, kwargs)) is not None:
            return self._read(tensor, f"{func.namespace}.{name}")
        result = func(*args, **kwargs)
        self._account(func, name, args, kwargs, result)
        return result

    def _read(self, tensor: Tensor | None, what: str) -> Any:
        place = here()
        known = self._known.get(place.key)
        if known is None:
            whose = "" if tensor is None else f" of a tensor {list(tensor.shape)} on {tensor.device}"
            raise HostWait(f"{place}: {what}{whose} waits for the device")
        if what != "tolist()" or tensor is None or tensor.device.type != "cpu":  # host tensors do not wait
            self.waits[place.key] += 1
        return known.answer(place.names, tensor)

    # ---- bytes

    def _account(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if kwargs.get("pin_memory") or (func.is_view and any(is_pinned(tensor) for tensor in given)):
            for tensor in made:
                setattr(tensor, PINNED, True)
        if func.is_view or name in ("detach", "alias"):
            return
        self.operations += 1
        seen = {id(tensor): tensor for tensor in (*given, *made)}.values()
        touched = sum(_bytes(tensor) for tensor in seen if tensor.device.type == "cuda")
        self.moved += touched
        if func.namespace == "c10d":
            self.sent += touched
        if len({tensor.device.type for tensor in seen}) == 2:
            self.host_bytes += sum(_bytes(tensor) for tensor in seen if tensor.device.type == "cpu")
        for tensor in made:
            if tensor.device.type == "cuda":
                self._allocated(name, tensor, given)
        if name == "copy_":
            self._copied_into(*args[:2])

    def _allocated(self, name: str, tensor: Tensor, given: Sequence[Tensor]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or any(other.untyped_storage()._cdata == key for other in given):
            return
        self._alive[key] = weakref.ref(storage, partial(self._freed, key))
        if size > self._bound:
            self.large.append((here(), Allocation(size, tuple(tensor.shape), name)))
        from_weights = [other for other in given if other.untyped_storage()._cdata in self._weights]
        copies = name in _COPIES and from_weights and len(from_weights) == len(given)
        alike = any(sorted(other.shape) == sorted(tensor.shape) and other.dim() > 1 for other in from_weights)
        if copies or (alike and not name.startswith("new_") and not name.endswith("_like")):  # whose values are others
            self._copied(name, tensor, size)

    def _copied_into(self, tensor: Tensor, source: Tensor) -> None:
        """Records a weight, or a part of one, that is copied into memory allocated in the step."""
        key = tensor.untyped_storage()._cdata
        if source.untyped_storage()._cdata in self._weights and key in self._alive:
            self._copied(
                "copy_", tensor, min(self._copies.get(key, 0) + _bytes(tensor), tensor.untyped_storage().nbytes())
            )

    def _copied(self, name: str, tensor: Tensor, size: int) -> None:
        self._copies[tensor.untyped_storage()._cdata] = size
        total = sum(self._copies.values())
        if total > self.most_copied.size:
            self.most_copied = Allocation(total, tuple(tensor.shape), f"{name} at {here()}")

    def _freed(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)
        self._copies.pop(key, None)


def _meets(watch: Watch, exchange: Callable[..., Any], value: Any, axis: Any, *rest: Any, **more: Any) -> Any:
    """Counts an exchange of plain values between ranks as a read on the host."""
    if axis.size > 1:
        watch._read(None, f"all_gather_json over {axis.name}")
    return exchange(value, axis, *rest, **more)


def _text(tensor: FakeTensor, watch: Watch, method: Callable[..., str], *spec: str) -> str:
    return str(watch._read(tensor, "text of")) if tensor.device.type == "cuda" else method(tensor, *spec)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _waits(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the tensor that this operation would make the host wait for, if any."""
    if name in ("_to_copy", "copy_"):
        return _copy_waits(name, args, kwargs)
    if name in ("index", "index_put", "index_put_"):
        return _index_waits(name, args)
    if name in _READ_WITHIN:
        return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags or name == "equal":
        return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    return None


def _index_waits(name: str, args: Any) -> Tensor | None:
    """Returns the index that an indexing operation waits for. The device counts a mask's places, unless all get one
    number. Host indices, such as a list, are copied to the device."""
    given = [index for index in args[1] if index is not None]
    masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
    fills = name != "index" and args[2].numel() == 1
    moved = [index for index in given if index.device.type != args[0].device.type]
    return next(iter([] if fills else masks), None) if masks else next(iter(moved), None)


def _copy_waits(name: str, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the source of a blocking or unpinned copy between host and device."""
    into, source = (None, args[0]) if name == "_to_copy" else args[:2]
    there = torch.device(kwargs.get("device") or source.device) if into is None else into.device
    if there.type == source.device.type:
        return None
    blocks = not (kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2]))
    if into is None and source.device.type == "cuda" and not blocks:
        return None  # torch makes the copy on the host in pinned memory
    host = source if source.device.type == "cpu" else into
    return source if blocks or host is None or not is_pinned(host) else None

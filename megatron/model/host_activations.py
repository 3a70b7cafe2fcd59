"""Offloads the activations of some layers to host memory (--cpu-offloading-num-layers).

The copy of a saved tensor to the host starts at once. Its device memory is freed when the layer's forward ends. When
backward reaches a layer, the activations of the layer before it are prefetched.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.utils.device import HostLink

LEAST_BYTES = 1 << 20
"""Least size, in bytes, of a tensor that is copied to the host. A smaller one is not worth a copy."""


@dataclass
class _Saved:
    """A tensor that was copied to the host."""

    host: Tensor
    """The elements, flat, in the order of `shape`."""
    shape: torch.Size
    device: torch.device
    fetched: Tensor | None = None
    arrived: Callable[[], None] = lambda: None


@dataclass
class _Layer:
    """The tensors that one layer saved in one forward pass."""

    before: "_Layer | None"
    tensors: list[_Saved] = field(default_factory=list)


class HostActivations:
    """The activations of one forward pass through several layers."""

    def __init__(self, link: HostLink, least_bytes: int = LEAST_BYTES) -> None:
        self._link, self._least_bytes = link, least_bytes
        # Weak: the autograd graph keeps a layer alive, and a layer references the layer before it.
        self._last: Callable[[], _Layer | None] = lambda: None

    @contextmanager
    def layer(self, module: nn.Module) -> Iterator[None]:
        """Copies tensors that are saved for backward within the context to the host, except weights of `module`."""
        layer = _Layer(self._last())
        self._last = weakref.ref(layer)
        # Holds the originals until the layer's forward ends, so that no other tensor can reuse their addresses.
        known: dict[Any, tuple[Tensor, _Saved]] = {}

        def pack(tensor: Tensor) -> Tensor | tuple[_Layer, _Saved]:
            size, repeats = tensor.numel() * tensor.element_size(), 0 in tensor.stride()
            # Read in each call, because the storage of sharded weights changes when the layer gathers them.
            if size < self._least_bytes or repeats or _storage(tensor) in _storages(module.parameters()):
                return tensor
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
            if key not in known:
                known[key] = tensor, self._sent(tensor)
                layer.tensors.append(known[key][1])
            return layer, known[key][1]

        def unpack(kept: Tensor | tuple[_Layer, _Saved]) -> Tensor:
            return kept if isinstance(kept, Tensor) else self._back(*kept)

        with saved_tensors_hooks(pack, unpack):
            yield
        known.clear()

    def _sent(self, tensor: Tensor) -> _Saved:
        host = self._link.empty(tensor.numel(), tensor.dtype)
        self._link.to_host(tensor.detach(), host.view(tensor.shape))
        return _Saved(host, tensor.shape, tensor.device)

    def _back(self, layer: _Layer, saved: _Saved) -> Tensor:
        self._fetch(layer)
        if layer.before is not None:
            self._fetch(layer.before)
        assert saved.fetched is not None
        saved.arrived()
        return saved.fetched

    def _fetch(self, layer: _Layer) -> None:
        for saved in layer.tensors:
            if saved.fetched is None:
                flat = torch.empty(saved.host.numel(), dtype=saved.host.dtype, device=saved.device)
                saved.arrived = self._link.to_device(saved.host, flat)
                saved.fetched = flat.view(saved.shape)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors}


@cache
def host_link(device: torch.device) -> HostLink:
    """Returns the device's copy stream, shared by all forward passes in flight."""
    return HostLink(device)

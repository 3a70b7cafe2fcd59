"""Simulates a CUDA device: tensors have shapes, dtypes and the device "cuda", but no memory.

    with fake_cuda() as device:
        ...          # build a model on `device`, run a step

The project's own code runs on torch's FakeTensors. Replaced are streams and events, pinned memory, random generators,
and the choice of torch's attention kernel. CUDA uses the kernel that materialises the scores only with a mask.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # before `_make_subclass` is replaced: it compares signatures
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
PINNED = "_pinned"


class Stream:
    """Runs work in program order, whichever stream it is given to."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    """Runs captured work once; a replay issues nothing new."""

    def replay(self) -> None: ...


class _Generator:
    """Random generator of the device. Its state is on the host, and nothing reads it."""

    def __init__(self, device: Any = CUDA) -> None:
        self.device, self._seed, self._offset = torch.device(device), 0, 0

    def manual_seed(self, seed: int) -> _Generator:
        self._seed = seed
        return self

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def get_state(self) -> tuple[int, int]:
        return self._seed, self._offset

    def set_state(self, state: tuple[int, int]) -> None:
        self._seed, self._offset = state


_REAL_GENERATOR = torch.Generator


def _generator(device: Any = "cpu") -> Any:
    return _REAL_GENERATOR() if torch.device(device).type == "cpu" else _Generator(device)


def _make_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool = False, **options: Any) -> Tensor:
    """Makes tensors that C++ sees on "meta" and Python on "cuda": autograd's engine would query a device's streams."""
    options.pop("dispatch_device", None)
    return _REAL_MAKE_SUBCLASS(cls, data, requires_grad, **options)


_REAL_MAKE_SUBCLASS = torch.Tensor._make_subclass


def pin(tensor: Tensor, *_: Any) -> Tensor:
    pinned = tensor.clone()
    setattr(pinned, PINNED, True)
    return pinned


def _empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    made = _REAL_EMPTY(*size, **options)
    if pin_memory:
        setattr(made, PINNED, True)
    return made


_REAL_EMPTY = torch.empty


def is_pinned(tensor: Tensor, *_: Any) -> bool:
    base: Any = tensor if tensor._base is None else tensor._base
    return getattr(tensor, PINNED, False) or getattr(base, PINNED, False)


def _address(tensor: Tensor) -> int:
    """Address of the tensor as if its storage were in memory; equal for views of the same place."""
    return tensor.untyped_storage()._cdata + int(tensor.storage_offset()) * tensor.element_size()


def _address_of_storage(storage: torch.UntypedStorage) -> int:
    return storage._cdata if storage.device.type == "meta" else _REAL_ADDRESS(storage)


_REAL_ADDRESS = torch.UntypedStorage.data_ptr


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Picks flash attention, or with a mask the memory-efficient kernel, which adds the mask to the scores."""
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    assert query.shape[1] == key.shape[1], "shared keys: that kernel takes none, and all scores would be computed"
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


@contextlib.contextmanager
def fake_cuda() -> Iterator[torch.device]:
    generator = _Generator()
    with pytest.MonkeyPatch.context() as patch, torch.autograd.set_multithreading_enabled(False):
        patch.setattr(torch.Tensor, "_make_subclass", staticmethod(_make_subclass))
        patch.setattr(FakeTensor, "is_cuda", property(lambda tensor: tensor.device.type == "cuda"), raising=False)
        patch.setattr(FakeTensor, "is_meta", property(lambda tensor: tensor.device.type == "meta"), raising=False)
        patch.setattr(FakeTensor, "data_ptr", _address, raising=False)
        patch.setattr(torch.UntypedStorage, "data_ptr", _address_of_storage)
        patch.setattr(torch.Tensor, "pin_memory", pin)
        patch.setattr(torch.Tensor, "is_pinned", is_pinned)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        # A mesh holds numbers on the host; for C++ the shards of fully_shard are on "meta".
        patch.setattr(DeviceMesh, "from_group", staticmethod(unset_fake_temporarily()(DeviceMesh.from_group)))
        patch.setattr(FSDPParamGroup, "_validate_no_meta_params", lambda group: None)
        patch.setattr(FSDPParamGroup, "_validate_cpu_offload_params", lambda group: None)
        _device_constructors()  # a list that torch makes once, with the real function in it
        patch.setattr(torch, "empty", _empty)
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Generator", _generator)
        patch.setattr(torch.cuda, "default_generators", (generator,))
        patch.setattr(torch.cuda, "get_rng_state", lambda device: generator.get_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: generator.set_state(state))
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "get_device_name", lambda device: "fake")
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            patch.setattr(torch.cuda, name, lambda device: 0)
        patch.setattr(torch.accelerator, "current_stream", Stream)
        patch.setattr(F, "scaled_dot_product_attention", _attention)
        with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False):
            yield CUDA


class NumbersOnDevice(TorchDispatchMode):
    """Puts scalars on "cuda" that C++ creates beside a tensor: C++ asks the tensor for its device and gets "meta"."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == torch.device("meta"):
            kwargs["device"] = CUDA
        return func(*args, **kwargs)


def replace_everywhere(patch: pytest.MonkeyPatch, function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Patches the function in every megatron module that imported it by name."""
    name = function.__name__
    for module in [one for path, one in sys.modules.items() if path.startswith("megatron.")]:
        if getattr(module, name, None) is function:
            patch.setattr(module, name, other)

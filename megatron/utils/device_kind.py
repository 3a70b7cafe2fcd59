"""Abilities of each kind of device. Code asks for an ability instead of comparing the kind's name.

An accelerator that plugs into torch is one entry of `KINDS`. A kind that is not listed has none of these abilities, and
a run works without them. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class DeviceKind:
    """The abilities of one kind of device."""

    asynchronous: bool = False
    """A step may be launched while the device still computes an earlier one."""
    pinned_batches: bool = False
    """Batches are loaded into pinned memory, so that copies to the device need no host sync."""
    copy_stream: bool = False
    """Batches are copied on a separate stream (`utils.cuda.CopyStream`)."""
    graphs: bool = False
    """A micro-batch's work can be recorded and replayed (`utils.cuda.CudaGraph`)."""
    tf32: bool = False
    """Products of fp32 tensors may round their factors to TF32."""
    double: bool = False
    """Double precision is supported."""
    memory_history: bool = False
    """The allocator counts its bytes, and records the code that allocated them."""
    native_kernels: bool = False
    """The library built from csrc/ may have kernels for it."""
    verified_kernels: bool = False
    """Each of these kernels is verified on the device before it is used."""
    cuda_libraries: bool = False
    """cuBLAS, cuDNN and NVIDIA's apex compute here: grouped and widening products, fused attention."""


KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {
        "cpu": DeviceKind(double=True, native_kernels=True),
        "cuda": DeviceKind(
            asynchronous=True,
            pinned_batches=True,
            copy_stream=True,
            graphs=True,
            tf32=True,
            double=True,
            memory_history=True,
            native_kernels=True,
            verified_kernels=True,
            cuda_libraries=True,
        ),
    }
)
"""Kinds by their names in torch."""
_OTHER = DeviceKind()


def kind_of(device_type: str) -> DeviceKind:
    """Returns the abilities of devices of this type ("cuda", "npu", ...)."""
    return KINDS.get(device_type, _OTHER)

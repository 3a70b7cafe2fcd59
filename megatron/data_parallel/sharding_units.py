"""Applies torch's `fully_shard` to the units of a model. Half-precision gradients are summed in fp32. The sums
use the process group of the axis, and appear in the log of the axis.

Functions import torch's sharding modules when they need them: the import takes a third of a second, which other ZeRO
stages save.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.distributed.rendezvous import open_group_of_one
from megatron.errors import ConfigError
from megatron.utils.dtype import HALF

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


HOOKS_OF_GRADIENTS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}
"""Method that registers a hook on a parameter -> attribute in which torch stores the hook."""


@dataclass(frozen=True)
class Unit:
    """Module whose parameters are gathered together, without those of units inside it."""

    module: nn.Module
    axis: Axis
    """Ranks over which the parameters are divided."""
    stays_gathered: bool = False
    """True if weights stay gathered from the forward to the backward pass."""
    backward_needs_weights: bool = True


def divide(units: Sequence[Unit], keep_gathered: bool, dtype: torch.dtype, device: torch.device, on_host: bool) -> None:
    """Divides the parameters of all units in place; half-precision ones become fp32. A unit must come after the units
    inside it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    axes = {unit.axis.name: unit.axis for unit in units}
    meshes = {name: DeviceMesh.from_group(_group(axis, device), device.type) for name, axis in axes.items()}
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype in HALF:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Memory can be pinned only if there is a device to copy from it.
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if on_host else OffloadPolicy()
    for unit in units:
        for parameter in unit.module.parameters():
            if parameter.dtype in HALF:
                parameter.data = parameter.data.float()
        unit.module.register_forward_hook(_own_storage)
        fully_shard(
            unit.module,
            mesh=meshes[unit.axis.name],
            mp_policy=policy,
            reshard_after_forward=not (keep_gathered or unit.stays_gathered),
            offload_policy=offload,
        )
    for unit in units:
        module = sharded(unit.module)
        module.set_reshard_after_backward(not keep_gathered, recurse=False)
        module.set_unshard_in_backward(unit.backward_needs_weights)
        # The loss decides what to divide a sum by; only nccl has averaging collectives.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        log_collectives(module, unit.axis)


def make_memory(model: nn.Module, device: torch.device, on_host: bool) -> None:
    """Allocates the shards of a model on the meta device, and its buffers (running means, say) on the computing
    device."""
    if not on_host:
        model.to_empty(device=device)
        return
    model.to_empty(device="cpu")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))  # keeps values that `to_empty` set again


def _group(axis: Axis, device: torch.device) -> dist.ProcessGroup:
    """Process group of an axis. On an axis of one rank, this is a group of one, which sends nothing."""
    if axis.size > 1:
        return axis.group
    if not dist.is_initialized():
        open_group_of_one(device)
    alone = dist.new_group(list(axis.ranks), use_local_synchronization=True, group_desc=axis.name)
    assert isinstance(alone, dist.ProcessGroup)
    return alone


def _own_storage(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Clones an output that is a view. The hook of fully_shard on a unit's output gradient needs this: an in-place
    operation on the view's base would lose the hook."""
    return output.clone() if isinstance(output, Tensor) and output.requires_grad and output._is_view() else output


def sharded(module: nn.Module) -> "FSDPModule":
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    return module


def refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]], way_out: str) -> None:
    """Raises a ConfigError if a parameter has a gradient hook, which `fully_shard` would not call. The hook
    `taken_over` is accepted."""
    for name, parameter in parameters:
        for kind, attribute in HOOKS_OF_GRADIENTS.items():
            if any(hook is not taken_over for hook in (getattr(parameter, attribute) or {}).values()):
                raise ConfigError(
                    f"{name} has a gradient hook ({kind}()), which would not be called with divided weights "
                    f"(ZeRO 2 and 3); {way_out}"
                )


def taken_over(*_: Any) -> None:
    """Replaces a hook that the framework calls itself; does nothing."""


def log_collectives(module: "FSDPModule", axis: Axis) -> None:
    """Adds the collectives of a unit to the log of `axis`, over which `fully_shard` divides the unit."""
    if axis.size > 1:
        module.set_custom_all_gather(_Gather(axis))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_ReduceScatter(axis))  # type: ignore[arg-type]


class _OwnBuffers:
    """Implements torch's interface for custom collectives without its base class, which some torch versions do not
    export."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_OwnBuffers):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return collectives.gather_into(output_tensor, input_tensor, self.axis, async_op=async_op)


class _ReduceScatter(_OwnBuffers):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return collectives.scatter_into(output_tensor, input_tensor, self.axis, op, async_op=async_op)

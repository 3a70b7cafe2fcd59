"""ZeRO 2 and 3: torch's fully_shard divides weights and gradients over the data-parallel ranks.

    sharded = FullySharded([Unit(layer, axis), ..., Unit(model, axis)], keep_gathered=False, device=device)
    sharded.zero()
    for batch in micro_batches:
        loss(batch).backward()     # every unit reduce-scatters its gradients; the shards add up, in fp32
    sharded.reduce()               # their sum is summed over the instances of the optimizer, if there are several
    ...                            # an optimizer updates weight(name) from grad(name)
    sharded.publish()              # the next forward pass gathers the new weights

The weights of a unit are gathered when its forward or backward pass begins. A rank keeps its shard of each parameter:
in fp32 where the model computes in half precision, so that it is the optimizer's master as well, and gathered in half
precision: what the model computes with is the rounded master, as without ZeRO.

torch's modules for it are imported by the functions that need them: they take a third of a second, which a run of
another stage does not have to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.data_parallel.gradients import FlatPieces, piece_alone
from megatron.data_parallel.logged_sharding import log_collectives
from megatron.data_parallel.same_use import SameUse
from megatron.data_parallel.shard_grads import InOneBuffer, OnHost, ShardGrads, as_dtensor, local
from megatron.data_parallel.withheld import Withholding
from megatron.distributed import collectives
from megatron.distributed.division import Division
from megatron.distributed.rendezvous import open_group_of_one
from megatron.distributed.shard import Range
from megatron.distributed.state import Axis
from megatron.errors import ConfigError
from megatron.utils.dtype import HALF

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered together, without those of units inside it."""

    module: nn.Module
    axis: Axis
    """The ranks that divide them."""
    stays_gathered: bool = False
    """From its forward to its backward pass."""
    backward_needs_weights: bool = True


@dataclass(frozen=True)
class _Shard:
    """This rank's rows of one parameter."""

    parameter: nn.Parameter
    """A DTensor."""
    described: nn.Parameter
    """The whole parameter on the meta device, in the type that the model computes in."""
    axis: Axis

    @property
    def weight(self) -> Tensor:
        """[elements of the rows], or all of the parameter in its own shape."""
        rows = local(self.parameter)
        return rows if self.axis.size == 1 else rows.view(-1)

    @property
    def rows(self) -> int:
        """The number of rows on every rank but the last ones, which have fewer or none."""
        return -(-self.parameter.shape[0] // self.axis.size)

    @property
    def held(self) -> Range:
        whole, row = self.parameter.numel(), prod(self.parameter.shape[1:])
        start = min(self.axis.rank * self.rows * row, whole)
        return start, min(start + self.rows * row, whole)


class FullySharded:
    """The `Gradients` of a model whose weights are divided."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        keep_gathered: bool,
        device: torch.device,
        on_host: bool = False,
        replicas: Axis | None = None,
        withheld: str | None = None,
        compared_over: Axis | None = None,
    ) -> None:
        """Divides the parameters of a model in place. The last unit is the whole model, which computes on `device`. It
        may be on the meta device: then the shards are made, unset. `keep_gathered` (ZeRO 2): weights stay gathered
        until they are updated. `on_host`: shards and their gradients are in host memory. `replicas`: the ranks of other
        instances that keep the same shards. `withheld`: a line for who uses `parameter.grad` after `withhold()`.
        `compared_over`: ranks that check in every step that they use the same parts."""
        assert not (keep_gathered and on_host), "weights that stay gathered are on the device"
        self._units, self.device, self._replicas = list(units), device, replicas
        model = units[-1].module
        self.dtype = _only_dtype(model)
        described = {name: _described(parameter) for name, parameter in model.named_parameters()}
        self._same_use: SameUse | None = None
        if compared_over is not None:
            self._same_use = SameUse(model, [unit.module for unit in units], compared_over, device)
        _divide(self._units, keep_gathered, self.dtype, device, on_host)
        if any(parameter.is_meta for parameter in model.parameters()):
            _make_memory(model, device, on_host)
        axes = {id(parameter): unit.axis for unit in reversed(self._units) for parameter in unit.module.parameters()}
        self._shards = {
            name: _Shard(parameter, described[name], axes[id(parameter)])
            for name, parameter in model.named_parameters()
        }
        for name, shard in self._shards.items():
            start, stop = shard.held
            assert shard.weight.numel() == stop - start, f"{name}: torch divides it in another way"
        trained = {name: shard.parameter for name, shard in self._shards.items() if shard.parameter.requires_grad}
        self._places = self._storages()
        model.register_load_state_dict_pre_hook(self._divide_loaded)
        self.flat = not on_host  # there the gradients of every step have places of their own
        self._grads: ShardGrads = OnHost(trained) if on_host else InOneBuffer(trained)
        self._withholding = None if withheld is None else Withholding(model, withheld)

    # weights, of frozen parameters too

    @property
    def all_names(self) -> tuple[str, ...]:
        return tuple(self._shards)

    def parameter(self, name: str) -> nn.Parameter:
        """The whole parameter as a description on the meta device."""
        return self._shards[name].described

    def weight(self, name: str) -> Tensor:
        return self._shards[name].weight

    def held(self, name: str) -> Range:
        return self._shards[name].held

    def divided_over(self, name: str) -> Axis:
        return self._shards[name].axis

    def division(self, name: str) -> Division | None:
        shard = self._shards[name]
        if shard.axis.size == 1:
            return None
        return Division(shard.axis, max(shard.rows * prod(shard.parameter.shape[1:]), 1))

    def replicas(self, name: str) -> Axis:
        return self._shards[name].axis

    def piece_of(self, name: str, whole: Tensor) -> Tensor:
        return whole if self.divided_over(name).size == 1 else whole.view(-1)[slice(*self.held(name))]

    @torch.no_grad()
    def whole_of(self, name: str, piece: Tensor) -> Tensor:
        shard, piece = self._shards[name], piece.to(self.device)
        if shard.axis.size == 1:
            return piece
        padded = piece.new_zeros(shard.rows * prod(shard.parameter.shape[1:]))
        padded[: piece.numel()] = piece
        gathered = collectives.gather_along(padded, shard.axis, 0)
        return gathered[: shard.parameter.numel()].view(shard.parameter.shape)

    def whole_weight(self, name: str) -> Tensor:
        """In the type that the model computes in. A collective, as `whole_of`."""
        return self.whole_of(name, self.weight(name).to(self.dtype))

    @torch.no_grad()
    def take(self, name: str, whole: Tensor) -> None:
        """Sets this rank's piece."""
        self.weight(name).copy_(self.piece_of(name, whole))

    def replaced(self) -> list[str]:
        """The parameters whose `.data` the program has replaced: `fully_shard` does not gather the new values."""
        return [name for name, place in self._storages().items() if place != self._places[name]]

    def _storages(self) -> dict[str, int]:
        return {name: shard.parameter.untyped_storage()._cdata for name, shard in self._shards.items()}

    def _divide_loaded(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Whole tensors of a state dict that is being loaded become this rank's rows. (It is torch's own copy.)"""
        for name, shard in self._shards.items():
            whole = state.get(prefix + name)
            if whole is not None and type(whole) in (Tensor, nn.Parameter) and whole.shape == shard.parameter.shape:
                rows = self.piece_of(name, whole.detach()).to(shard.weight.device, shard.weight.dtype)
                state[prefix + name] = as_dtensor(rows.view(local(shard.parameter).shape), shard.parameter)

    # gradients

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, shard in self._shards.items() if shard.described.requires_grad)

    def frozen(self) -> list[str]:
        """The parameters that were trainable at construction and have been frozen since."""
        return [name for name in self.names if not self._shards[name].parameter.requires_grad]

    def unused(self) -> list[str]:
        """Those of `names` that no rank has used in this step, if that is compared. They have a gradient of zero."""
        return [] if self._same_use is None else self._same_use.unused(self.names)

    def grad_dtype(self, name: str) -> torch.dtype:
        return self._shards[name].parameter.dtype

    def grad(self, name: str) -> Tensor:
        grad = self._grads.grad(name)
        return grad if self._shards[name].axis.size == 1 else grad.view(-1)

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.grad(name)) for name in self.names)

    def runs(self) -> Iterator[tuple[str, Tensor]]:
        return self.grads()

    def flat_buffers(self) -> Iterator[FlatPieces]:
        """Each shard by itself: the gradients lie in one buffer, and the weights where fully_shard has put them."""
        return (piece_alone(self, name) for name in self.names)

    def multiply(self, factor: Tensor | float) -> None:
        self._grads.multiply(factor)

    def zero(self) -> None:
        self._grads.zero()
        if self._same_use is not None:
            self._same_use.begin()

    def expect(self) -> None:
        if self._withholding is not None:
            self._withholding.end()

    def withhold(self) -> None:
        if self._withholding is not None:
            self._withholding.begin()
        if self._same_use is not None:
            self._same_use.end_pass()

    def arm(self) -> None:
        """A no-op: every backward pass reduces."""

    def reduce(self) -> None:
        """Sums over the instances of the optimizer. The sum within this rank's instance ended with the last backward
        pass."""
        self.expect()
        if self._same_use is not None:
            self._same_use.check()
        if self._replicas is not None:
            self._grads.sum_over(self._replicas)

    def publish(self) -> None:
        """Marks the gathered weights as stale."""
        for unit in self._units:
            _sharded(unit.module).reshard()

    def wait_for_weights(self) -> None:
        """A no-op: each pass waits for the weights that it gathers."""

    def close(self) -> None:
        """A no-op: the model stays divided."""


def _divide(
    units: Sequence[Unit], keep_gathered: bool, dtype: torch.dtype, device: torch.device, on_host: bool
) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    axes = {unit.axis.name: unit.axis for unit in units}
    meshes = {name: DeviceMesh.from_group(_group(axis, device), device.type) for name, axis in axes.items()}
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype in HALF:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Memory can be pinned where there is a device to copy from it.
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
        module = _sharded(unit.module)
        module.set_reshard_after_backward(not keep_gathered, recurse=False)
        module.set_unshard_in_backward(unit.backward_needs_weights)
        # The loss decides what a sum is divided by; averaging collectives are nccl's alone.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        log_collectives(module, unit.axis)


def _make_memory(model: nn.Module, device: torch.device, on_host: bool) -> None:
    """Allocates the shards of a model on the meta device, and its buffers, such as running means, on the device it
    computes on."""
    if not on_host:
        model.to_empty(device=device)
        return
    model.to_empty(device="cpu")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))  # some modules have set theirs again


def _group(axis: Axis, device: torch.device) -> dist.ProcessGroup:
    """The process group of an axis. A rank that shares its weights with no other gets a group of one, and sends
    nothing."""
    if axis.size > 1:
        return axis.group
    if not dist.is_initialized():
        open_group_of_one(device)
    alone = dist.new_group(list(axis.ranks), use_local_synchronization=True, group_desc=axis.name)
    assert isinstance(alone, dist.ProcessGroup)
    return alone


def _own_storage(module: nn.Module, arguments: Any, output: Any) -> Any:
    """fully_shard hooks into the gradient of a unit's output, which must not be a view: an operation in place on the
    tensor behind it would lose the hook."""
    return output.clone() if isinstance(output, Tensor) and output.requires_grad and output._is_view() else output


def _sharded(module: nn.Module) -> FSDPModule:
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    return module


def _only_dtype(model: nn.Module) -> torch.dtype:
    """The one that the model computes in: its weights are gathered in it."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        listed = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"--zero-stage: stages 2 and 3 gather all weights in one type, and those of this model are {listed}; cast "
            "it to one of them, or use --zero-stage 1"
        )
    return dtypes.pop()


def _described(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

"""Implements ZeRO 2 and 3: torch's fully_shard divides weights and gradients over the data-parallel ranks.

    sharded = FullySharded([Unit(layer, axis), ..., Unit(model, axis)], keep_gathered=False, device=device)
    sharded.zero()
    for batch in micro_batches:
        loss(batch).backward()     # every unit reduce-scatters its gradients; shards accumulate in fp32
    sharded.reduce()               # sums over the instances of the optimizer, if there are several
    ...                            # an optimizer updates weight(name) from grad(name)
    sharded.publish()              # the next forward pass gathers the new weights

The weights of a unit are gathered when its forward or backward pass begins. A rank keeps its shard of each parameter.
If the model computes in half precision, the shard is in fp32 and is also the optimizer's master. Shards are gathered in
half precision: the model computes with the rounded master, as without ZeRO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megatron.data_parallel.shard_grads import InOneBuffer, OnHost, local
from megatron.data_parallel.sharding_units import Unit, divide, make_memory, refuse_hooks, sharded
from megatron.data_parallel.training_store import TrainingStore
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError
from megatron.state.division import Division
from megatron.state.store import FlatRun, run_alone


@dataclass(frozen=True)
class _Divided:
    """Parameter of which this rank holds some rows."""

    parameter: nn.Parameter
    """A DTensor."""
    described: nn.Parameter
    """Whole parameter on the meta device, in the dtype that the model computes in."""
    axis: Axis
    number: int

    @property
    def share(self) -> int:
        """Number of elements on every rank but the last ones, which have fewer or none."""
        shape = self.parameter.shape
        return max(-(-shape[0] // self.axis.size) * prod(shape[1:]), 1)

    @property
    def division(self) -> Division | None:
        if self.axis.size == 1:
            return None
        return Division(self.axis.members, self.parameter.numel(), self.share, row=self.number)


class FullySharded(TrainingStore):
    """Store whose weights and gradients are divided over the ranks."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        keep_gathered: bool,
        device: torch.device,
        on_host: bool = False,
        replicas: Axis | None = None,
    ) -> None:
        """Divides the parameters of a model in place. The last unit is the whole model, which computes on `device`. If
        the model is on the meta device, the shards are allocated without values. With `keep_gathered` (ZeRO 2) weights
        stay gathered until they are updated. With `on_host`, shards and their gradients are in host memory. `replicas`:
        axis of the ranks that keep the same shards, one in each instance of the optimizer."""
        assert not (keep_gathered and on_host), "keep_gathered: gathered weights are on the device, not on the host"
        self._units, self.device, self._replicas = list(units), device, replicas
        model = units[-1].module
        self.dtype = _only_dtype(model)
        described = {name: _described(parameter) for name, parameter in model.named_parameters()}
        refuse_hooks(model.named_parameters(), "remove the hook, or use ZeRO stage 1")
        divide(self._units, keep_gathered, self.dtype, device, on_host)
        if any(parameter.is_meta for parameter in model.parameters()):
            make_memory(model, device, on_host)
        axes = {id(parameter): unit.axis for unit in reversed(self._units) for parameter in unit.module.parameters()}
        self._divided = {
            name: _Divided(parameter, described[name], axes[id(parameter)], number)
            for number, (name, parameter) in enumerate(model.named_parameters())
        }
        self.all_names = tuple(self._divided)  # frozen parameters included
        self.names = tuple(name for name, one in self._divided.items() if one.described.requires_grad)
        self.axes = {name: one.axis for name, one in self._divided.items()}
        self.divisions = {name: one.division for name, one in self._divided.items()}
        self.grad_dtypes = {name: one.parameter.dtype for name, one in self._divided.items()}
        for name in self.all_names:
            start, stop = self.held(name)
            assert self.weight(name).numel() == stop - start, f"{name}: torch divided it differently"
        self.flat = not on_host
        trained = {name: self._divided[name].parameter for name in self.names}
        self._grads: InOneBuffer | OnHost = OnHost(trained) if on_host else InOneBuffer(trained)

    def parameter(self, name: str) -> nn.Parameter:
        """Parameter in its whole shape, on the meta device."""
        return self._divided[name].described

    def weight(self, name: str) -> Tensor:
        """This rank's rows as a flat tensor, or the whole parameter in its own shape if it is not divided."""
        rows = local(self._divided[name].parameter)
        return rows if self.divisions[name] is None else rows.view(-1)

    def grad(self, name: str) -> Tensor:
        grad = self._grads.grad(name)
        return grad if self.divisions[name] is None else grad.view(-1)

    def runs(self) -> list[FlatRun]:
        """Returns one `FlatRun` per shard: the gradients are in one buffer, but `fully_shard` decides where the weights
        are."""
        return [run_alone(self, name) for name in self.names]

    def multiply(self, factor: Tensor | float) -> None:
        self._grads.multiply(factor)

    @torch.no_grad()
    def whole_of(self, name: str, part: Tensor) -> Tensor:
        one, part = self._divided[name], part.to(self.device)
        if one.axis.size == 1:
            return part
        padded = part.new_zeros(one.share)
        padded[: part.numel()] = part
        gathered = collectives.gather_along(padded, one.axis, 0)
        return gathered[: one.parameter.numel()].view(one.parameter.shape)

    def whole_weight(self, name: str) -> Tensor:
        """Whole weight in the dtype that the model computes in. A collective, as `whole_of`."""
        return self.whole_of(name, self.weight(name).to(self.dtype))

    @torch.no_grad()
    def take(self, name: str, whole: Tensor) -> None:
        """Copies this rank's part of a whole weight into its shard."""
        self.weight(name).copy_(self.part_of(name, whole))

    def zero(self) -> None:
        self._grads.zero()

    def reduce(self) -> None:
        """Sums over the instances of the optimizer. The last backward pass has completed the sum within this rank's
        instance."""
        if self._replicas is not None:
            self._grads.sum_over(self._replicas)

    def publish(self) -> None:
        """Frees the gathered weights, which are out of date; the next forward pass gathers the new ones."""
        for unit in self._units:
            sharded(unit.module).reshard()


def _only_dtype(model: nn.Module) -> torch.dtype:
    """Dtype that the model computes in, and in which its weights are gathered."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        listed = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"--zero-stage: stages 2 and 3 need all weights in one dtype, but this model's are {listed}; cast "
            "the model to one of them, or use --zero-stage 1"
        )
    return dtypes.pop()


def _described(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

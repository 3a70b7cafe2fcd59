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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data_parallel.gathered_writes import GatheredWrites, refuse_new_parameters
from megatron.data_parallel.gradient_hooks import refuse_hooks
from megatron.data_parallel.gradients import FlatPieces, piece_alone
from megatron.data_parallel.guarded_shards import guard
from megatron.data_parallel.same_use import SameUse
from megatron.data_parallel.shard_grads import InOneBuffer, OnHost, ShardGrads, as_dtensor, local
from megatron.data_parallel.sharding_units import Unit, begin, divide, make_memory, sharded
from megatron.data_parallel.withheld import Withholding
from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.errors import ConfigError
from megatron.state.division import Division, Range


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
        modules = [unit.module for unit in units]
        self._same_use = None if compared_over is None else SameUse(model, modules, compared_over, device)
        self._writes = None if withheld is None else GatheredWrites(model, modules)
        refuse_hooks(model.named_parameters(), "leave it out, or use stage 1")
        divide(self._units, keep_gathered, self.dtype, device, on_host)
        if self._same_use is not None:
            self._same_use.compare_gathers()
        if any(parameter.is_meta for parameter in model.parameters()):
            make_memory(model, device, on_host)
        axes = {id(parameter): unit.axis for unit in reversed(self._units) for parameter in unit.module.parameters()}
        self._shards = {
            name: _Shard(parameter, described[name], axes[id(parameter)])
            for name, parameter in model.named_parameters()
        }
        for name, shard in self._shards.items():
            start, stop = shard.held
            assert shard.weight.numel() == stop - start, f"{name}: torch divides it in another way"
        trained = {name: shard.parameter for name, shard in self._shards.items() if shard.parameter.requires_grad}
        self._first_name = _names_of_tied(model)
        self._places = self._storages()
        model.register_load_state_dict_pre_hook(self._divide_loaded)
        model.register_forward_pre_hook(self._before_pass, prepend=True)
        self.flat = not on_host  # there the gradients of every step have places of their own
        self._grads: ShardGrads = OnHost(trained) if on_host else InOneBuffer(trained)
        self._withholding = None if withheld is None else Withholding(model, withheld)
        if withheld is not None:
            guard({name: shard.parameter for name, shard in self._shards.items()}, modules)
            begin(model)

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
        share = max(shard.rows * prod(shard.parameter.shape[1:]), 1)
        return Division(shard.axis.members, shard.parameter.numel(), share)

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

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Returns the model's state dict with whole tensors. A collective."""
        state = self._units[-1].module.state_dict(keep_vars=True)  # which reshards: from here on weights are shards
        name_of = {id(shard.parameter): name for name, shard in self._shards.items()}
        whole = {name: self.whole_weight(name) for name in self.all_names}
        return {key: whole[name_of[id(one)]] if id(one) in name_of else one.detach() for key, one in state.items()}

    @torch.no_grad()
    def take(self, name: str, whole: Tensor) -> None:
        """Sets this rank's piece."""
        self.weight(name).copy_(self.piece_of(name, whole))

    def replaced(self) -> list[str]:
        """The parameters whose `.data` the program has replaced: `fully_shard` does not gather the new values."""
        return [name for name, place in self._storages().items() if place != self._places[name]]

    def lost_writes(self) -> list[str]:
        """The parameters that the program has written while they were gathered."""
        return [] if self._writes is None else self._writes.found()

    def refuse_new_hooks(self) -> None:
        """Raises a ConfigError that names a shard with a gradient hook: autograd never calls it."""
        shards = ((name, shard.parameter) for name, shard in self._shards.items())
        refuse_hooks(shards, "set it before megatron.compat.initialize()")

    def _storages(self) -> dict[str, int]:
        return {name: shard.parameter.untyped_storage()._cdata for name, shard in self._shards.items()}

    def _divide_loaded(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Whole tensors of a state dict that is being loaded become this rank's rows. (It is torch's own copy.)"""
        for key, name in self._first_name.items():
            shard, whole = self._shards[name], state.get(prefix + key)
            if whole is not None and type(whole) in (Tensor, nn.Parameter) and whole.shape == shard.parameter.shape:
                rows = self.piece_of(name, whole.detach()).to(shard.weight.device, shard.weight.dtype)
                state[prefix + key] = as_dtensor(rows.view(local(shard.parameter).shape), shard.parameter)

    # gradients

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, shard in self._shards.items() if shard.described.requires_grad)

    def frozen(self) -> list[str]:
        """The parameters that were trainable at construction and have been frozen since."""
        self._follow_freezing()
        return [name for name in self.names if not self._shards[name].parameter.requires_grad]

    def _before_pass(self, model: nn.Module, *_: object) -> None:
        self._follow_freezing()
        if self._writes is not None:
            shards = {id(shard.parameter) for shard in self._shards.values()}
            refuse_new_parameters(model, shards | self._writes.gathered)

    def _follow_freezing(self) -> None:
        if self._writes is not None:
            self._writes.follow_freezing({name: shard.parameter for name, shard in self._shards.items()})

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
            sharded(unit.module).reshard()

    def wait_for_weights(self) -> None:
        """A no-op: each pass waits for the weights that it gathers."""

    def close(self) -> None:
        """A no-op: the model stays divided."""


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


def _names_of_tied(model: nn.Module) -> dict[str, str]:
    """Returns the first name of every parameter by each of its names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}


def _described(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

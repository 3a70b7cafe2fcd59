"""Gradient stores of the engine for any model. They make a program that uses `parameter.grad` between passes raise an
error."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat.any_model.gathered_writes import GatheredWrites, refuse_new_parameters
from megatron.compat.any_model.guarded_shards import guard
from megatron.compat.any_model.same_use import SameUse
from megatron.compat.any_model.withheld import WithheldGrad, Withholding
from megatron.data_parallel import BucketStore, FullySharded, Unit
from megatron.data_parallel.buckets import GradientSlot
from megatron.data_parallel.shard_grads import as_dtensor, local
from megatron.data_parallel.sharding_units import refuse_hooks, sharded
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError


class KeptGradients(BucketStore):
    """Gradients in buckets. `parameter.grad` holds a stand-in that raises, so the program's `zero_grad()` cannot drop
    accumulated gradients."""

    def __init__(
        self, params: Iterable[tuple[str, nn.Parameter]], dp: Axis, *, overlap: bool, divided: bool, withheld: str
    ) -> None:
        """`withheld` is the text of the error."""
        super().__init__(params, dp, overlap=overlap, divided=divided, flat=True, counts_lacking=True)
        self._stand_ins = {name: WithheldGrad(slot.parameter, withheld) for name, slot in self._slots.items()}
        for slot in self._slots.values():
            slot.shown = False

    @property
    def lacking(self) -> list[str]:
        """Parameters without a gradient on this rank in this step; `reduce` has given them zeros."""
        return self._lacking

    @property
    def counts_lacking(self) -> bool:
        """True if `reduce` also reports to all ranks that one of them lacked a gradient. (False if buffers are divided,
        because their messages do not carry the count.)"""
        return all(bucket.count is not None for bucket in self._buckets)

    def some_rank_lacked(self) -> bool:
        """Returns whether any rank lacked a gradient, the same on all ranks. Valid after `reduce`."""
        return any(bucket.lacked for bucket in self._buckets)

    def start_reduce(self) -> None:
        """The first half of `reduce`: starts the remaining sums."""
        self._start_reduce()

    def finish_reduce(self) -> None:
        """The second half of `reduce`: waits for the sums."""
        self._finish_reduce()

    def check_writes(self) -> None:
        """No-op: whole weights keep what the program writes."""

    def expect(self) -> None:
        """Removes the stand-ins before another backward pass of the step, because autograd would add to them."""
        for slot in self._slots.values():
            slot.parameter.grad = None

    def withhold(self) -> None:
        """No-op after a backward pass: a stand-in replaces every gradient as it arrives."""

    def _stand_in(self, slot: GradientSlot) -> Tensor | None:
        return self._stand_ins[slot.name]

    def _grad_that_came(self, slot: GradientSlot) -> Tensor:
        grad = slot.parameter.grad
        if isinstance(grad, WithheldGrad):
            grad = grad.take_what_came()
        if grad is None:
            raise ConfigError(
                f"the gradient of {slot.name} was taken by an earlier engine of this model; use that engine, or "
                "create the model again"
            )
        return grad


class GuardedWeights(FullySharded):
    """Sharded weights. Raises if a program changes weights or gradients in a way that would be lost."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        keep_gathered: bool,
        device: torch.device,
        on_host: bool,
        withheld: str,
        compared_over: Axis,
    ) -> None:
        """`withheld` is the text of the error for using `parameter.grad` after `withhold()`. Ranks of `compared_over`
        check in every step that they use the same layers."""
        model, modules = units[-1].module, [unit.module for unit in units]
        self._same_use = SameUse(model, modules, compared_over, device)
        self._writes = GatheredWrites(model, modules)
        super().__init__(units, keep_gathered=keep_gathered, device=device, on_host=on_host)
        self._same_use.compare_gathers()
        self._first_name = _names_of_tied(model)
        self._places = self._storages()
        model.register_load_state_dict_pre_hook(self._divide_loaded)
        model.register_forward_pre_hook(self._before_pass, prepend=True)
        self._withholding = Withholding(model, withheld)
        guard({name: one.parameter for name, one in self._divided.items()}, modules)
        # Makes the model the root even if a unit is called before it: torch takes the first one that is called.
        sharded(model)._get_fsdp_state()._lazy_init()

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Returns the model's state dict with whole tensors. A collective."""
        state = self._units[-1].module.state_dict(keep_vars=True)  # reshards: from here on weights are shards
        name_of = {id(one.parameter): name for name, one in self._divided.items()}
        whole = {name: self.whole_weight(name) for name in self.all_names}
        return {key: whole[name_of[id(one)]] if id(one) in name_of else one.detach() for key, one in state.items()}

    def check_writes(self) -> None:
        """Raises a ConfigError if the program has written weights in a way that sharding loses: it has replaced `.data`
        (whose new values `fully_shard` does not gather), or has written to gathered weights."""
        for name, place in self._storages().items():
            if place != self._places[name]:
                raise ConfigError(
                    f"{name}.data was replaced, but under ZeRO its memory is part of a buffer; "
                    f"use engine.load_state_dict({{...}}, strict=False), with the whole tensor"
                )
        if written := self._writes.found():
            raise ConfigError(
                f"{written[0]} was written between a forward pass and engine.step(), while it was gathered (ZeRO), "
                "so its new values would be lost; write after engine.step(), before the next forward pass"
            )

    def absent(self) -> set[str]:
        """Returns the parameters that were frozen after construction, and those that no rank has used in this step.
        Their gradients are zero."""
        self._follow_freezing()
        frozen = (name for name in self.names if not self._divided[name].parameter.requires_grad)
        return {*frozen, *self._same_use.unused(self.names)}

    def zero(self) -> None:
        super().zero()
        self._same_use.begin()

    def expect(self) -> None:
        self._withholding.end()

    def withhold(self) -> None:
        self._withholding.begin()
        self._same_use.end_pass()

    def reduce(self) -> None:
        self.check_writes()
        shards = ((name, one.parameter) for name, one in self._divided.items())  # autograd never calls their hooks
        refuse_hooks(shards, "set it before megatron.compat.initialize()")
        self.expect()
        self._same_use.check()
        super().reduce()

    def _before_pass(self, model: nn.Module, *_: object) -> None:
        self._follow_freezing()
        shards = {id(one.parameter) for one in self._divided.values()}
        refuse_new_parameters(model, shards | self._writes.gathered)

    def _follow_freezing(self) -> None:
        self._writes.follow_freezing({name: one.parameter for name, one in self._divided.items()})

    def _storages(self) -> dict[str, int]:
        return {name: one.parameter.untyped_storage()._cdata for name, one in self._divided.items()}

    def _divide_loaded(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replaces whole tensors that are being loaded by this rank's rows. (`state` is torch's own copy.)"""
        for key, name in self._first_name.items():
            shard, whole = self._divided[name].parameter, state.get(prefix + key)
            if whole is not None and type(whole) in (Tensor, nn.Parameter) and whole.shape == shard.shape:
                weight = self.weight(name)
                rows = self.part_of(name, whole.detach()).to(weight.device, weight.dtype)
                state[prefix + key] = as_dtensor(rows.view(local(shard).shape), shard)


def _names_of_tied(model: nn.Module) -> dict[str, str]:
    """Maps every name of a parameter to its first name. A tied parameter has several names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}

"""FairScale's OSS: a torch optimizer whose state is sharded over the ranks by whole parameters.

    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    model = ShardedDataParallel(model, optimizer)      # or any other data parallelism

Each parameter has an owner, which keeps its state and updates it; then the owners broadcast their parameters.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.compat.fairscale.oss_state import gather_state
from megatron.compat.wrapper import axis_of
from megatron.distributed import collectives
from megatron.errors import ConfigError


class OSS(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        optim: type[torch.optim.Optimizer] = torch.optim.SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_fp16: bool = False,
        **default: Any,
    ) -> None:
        """Creates an optimizer of class `optim` with the options `default`. With `broadcast_fp16`, updated parameters
        are rounded to fp16 for the broadcast, equally on all ranks."""
        _check_arguments(params, optim, default)
        self.axis = axis_of(group, "OSS")
        self._owners: dict[int, int] = {}
        self._loads = [0] * self.axis.size
        self._broadcast_fp16 = broadcast_fp16
        self._whole: dict[int, dict[str, Any]] | None = None
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(params, default)
        self._inner = optim([self._own(group) for group in self.param_groups], **default)
        self.defaults = {**self._inner.defaults, **default}  # schedules look there for options to cycle
        for group_, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for name, value in inner.items():
                group_.setdefault(name, value)

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters that this rank owns."""
        assert self._inner is not None
        return self._inner

    def owner_of(self, parameter: Tensor) -> int:
        """Rank of the parameter's owner within the group."""
        return self._owners[id(parameter)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of the groups, on every rank."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Assigns each parameter, the largest first, to the rank with the fewest elements."""
        super().add_param_group(param_group)
        for parameter in sorted(self.param_groups[-1]["params"], key=lambda one: -one.numel()):
            rank = self._loads.index(min(self._loads))
            self._owners[id(parameter)] = rank
            self._loads[rank] += parameter.numel()
        if self._inner is not None:
            self._inner.add_param_group(self._own(self.param_groups[-1]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters, with the options of `param_groups`, and broadcasts the results."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._whole = None
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        self.optim.step()
        self._broadcast()
        return loss

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their norm over all parameters is at most `max_norm`; returns the norm before.
        All ranks call it."""
        own = [one.grad for one in self.parameters if self.owner_of(one) == self.axis.rank and one.grad is not None]
        device = self.parameters[0].device
        mine = torch.nn.utils.get_total_norm(own, norm_type).to(device) if own else torch.zeros((), device=device)
        if norm_type == float("inf"):
            total = collectives.all_reduce(mine.view(1).clone(), self.axis, "max")[0]
        else:
            total = collectives.all_reduce(mine.double().pow(norm_type).view(1), self.axis)[0].pow(1 / norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
        return total.to(mine.dtype)

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gathers the state of all parameters on one rank of the group, or on all with -1. Its `state_dict()` then
        returns the whole state. All ranks call it."""
        found = gather_state(self.optim.state, self.parameters, self.owner_of, self.axis)
        self._whole = found if recipient_rank in (-1, self.axis.rank) else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state in the format of `optim`, so an unsharded optimizer of that class can load it."""
        if self._whole is None:
            raise ConfigError(
                "OSS.state_dict(): the state is divided over the ranks; call "
                "consolidate_state_dict(recipient_rank=RANK) on all ranks after the last step(), then state_dict() on "
                "that rank"
            )
        groups, first = [], 0
        for group in self.param_groups:
            numbers = list(range(first, first + len(group["params"])))
            groups.append({**{name: value for name, value in group.items() if name != "params"}, "params": numbers})
            first += len(numbers)
        return {"state": self._whole, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a whole state dict, on every rank; each keeps the state of the parameters that it owns."""
        saved = state_dict["param_groups"]
        sizes, here = [len(group["params"]) for group in saved], [len(group["params"]) for group in self.param_groups]
        if sizes != here:
            raise ConfigError(
                f"OSS.load_state_dict(): the loaded groups have {sizes} parameters, this model's have {here}; load "
                "this model's state"
            )
        own: dict[int, Any] = {}
        groups, number = [], 0
        for group, into in zip(saved, self.param_groups, strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            into.update(options)
            numbers = []
            for saved_as, parameter in zip(group["params"], into["params"], strict=True):
                if self.owner_of(parameter) != self.axis.rank:
                    continue
                if saved_as in state_dict["state"]:
                    own[number] = state_dict["state"][saved_as]
                numbers.append(number)
                number += 1
            groups.append({**options, "params": numbers})
        self.optim.load_state_dict({"state": own, "param_groups": groups})

    def _own(self, group: Mapping[str, Any]) -> dict[str, Any]:
        mine = [one for one in group["params"] if self.owner_of(one) == self.axis.rank]
        return {**group, "params": mine}

    @torch.no_grad()
    def _broadcast(self) -> None:
        """Broadcasts all owners' parameters at once, in the same order on every rank."""
        if self.axis.size == 1:
            return
        waiting = []
        for owner in range(self.axis.size):
            for some in by_type(one for one in self.parameters if one.requires_grad and self.owner_of(one) == owner):
                message = torch.cat([one.detach().reshape(-1) for one in some])
                if self._broadcast_fp16:
                    message = message.half()
                waiting.append((some, collectives.start_broadcast(message, self.axis, owner)))
        for some, pending in waiting:
            parts = pending.wait().split([one.numel() for one in some])
            for parameter, part in zip(some, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))


def by_type(tensors: Iterable[Any]) -> list[list[Any]]:
    """Groups tensors by dtype and device; each group travels as one message."""
    found: dict[tuple[torch.dtype, torch.device], list[Any]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def _check_arguments(params: Any, optim: Any, default: Mapping[str, Any]) -> None:
    right = "OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)"
    if isinstance(params, torch.optim.Optimizer):
        raise ConfigError(
            f"OSS: the first argument is an optimizer ({type(params).__name__}); give the parameters, and the "
            f"optimizer's class and options: {right}"
        )
    if isinstance(params, nn.Module):
        raise ConfigError(
            f"OSS: the first argument is a module ({type(params).__name__}); give its parameters: {right}"
        )
    if not isinstance(optim, type):
        raise ConfigError(
            f"OSS: optim is an instance ({type(optim).__name__}); give the class, and its options by name: {right}"
        )
    if not issubclass(optim, torch.optim.Optimizer):
        raise ConfigError(
            f"OSS: optim is the class {optim.__name__}, which is not a torch.optim.Optimizer; give such a "
            f"class: {right}"
        )
    if issubclass(optim, torch.optim.LBFGS):
        raise ConfigError(
            f"OSS: optim is {optim.__name__}, which recomputes the loss of all parameters within its step; give "
            f"another class: {right}"
        )
    known = inspect.signature(optim.__init__).parameters
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    unknown = [name for name in default if name not in known and not open_ended]
    if unknown:
        raise ConfigError(
            f"OSS: {unknown[0]}: neither {optim.__name__} nor OSS has this option (the process group sets "
            f"the ranks); remove it: {right}"
        )

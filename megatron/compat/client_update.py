"""Updates by the user's own torch.optim optimizer, of any class and with any parameter groups.

The optimizer's groups hold the tensors that this rank updates: its piece of a parameter, or the fp32 master of a
half-precision one. The optimizer applies its own rule and rates, so torch's schedulers and edits of `param_groups`
work.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data_parallel import TrainingStore
from megatron.errors import CheckpointError, ConfigError
from megatron.optimizer.decision import HostDecision
from megatron.optimizer.update_rules import OptimizerState
from megatron.utils.dtype import HALF

_NEED_WHOLE = ("Adafactor", "LBFGS", "Muon")
_HAVE_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_COUNTER = "step"
"""torch's update counter: one number per parameter, even where its shape equals the parameter's."""


class ClientUpdate:
    def __init__(
        self,
        grads: TrainingStore,
        optimizer: torch.optim.Optimizer,
        absent: Callable[[], Collection[str]] = tuple,
        *,
        names: Mapping[int, str] | None = None,
        on_host: bool = False,
    ) -> None:
        """Takes an `optimizer` whose groups hold parameters of `grads`. The optimizer skips `absent()`, the parameters
        without a gradient on any rank in this step, as torch does. If the optimizer holds other objects than `grads`,
        `names` maps their ids to names in `grads`. With `on_host`, masters and states are in host memory."""
        self.optimizer = optimizer
        self._absent, self._on_host = absent, on_host
        self._grads = grads
        names = names or {id(grads.parameter(name)): name for name in grads.names}
        self._tensors: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            group["params"] = [self._take(names[id(one)], one) for one in group["params"] if id(one) in names]
        self._halves = [name for name in self._tensors if grads.parameter(name).dtype in HALF]
        self._copies = [name for name, tensor in self._tensors.items() if tensor is not self._weights[name]]
        self._versions = self._written()
        pieces = [name for name, weight in self._weights.items() if weight is not grads.parameter(name)]
        self._places = {name: grads.parameter(name).data_ptr() for name in pieces}
        self._number = _number_of_tensors(optimizer)
        choose_fused(optimizer)
        self._given = [_options(group) for group in optimizer.param_groups]

    def step(self, decision: HostDecision) -> None:
        """Makes one update with the rates of the optimizer's groups. Must be called with autograd off."""
        if _number_of_tensors(self.optimizer) != self._number:
            raise ConfigError(
                "optimizer.add_param_group(): the engine has no gradient buffers for parameters that are added later; "
                "give the optimizer all of them before megatron.compat.initialize() (a group of lr 0 stays unchanged)"
            )
        moved = [name for name, place in self._places.items() if self._grads.parameter(name).data_ptr() != place]
        if moved:
            raise ConfigError(
                f"{moved[0]}.data was replaced, but under ZeRO its memory is part of a buffer; write into "
                f"it: {moved[0]}.data.copy_(...)"
            )
        if not decision.applied:
            return
        if self._copies:
            self._take_up_writes()
        if decision.factor != 1.0:
            self._grads.multiply(decision.factor)
        absent = self._absent()
        for name, tensor in self._tensors.items():
            if not tensor.is_contiguous():
                raise ConfigError(
                    f"{name} got another memory format after megatron.compat.initialize(), which made it contiguous; "
                    "remove the conversion, and convert only the inputs"
                )
            grad = None if name in absent else self._grads.grad(name)
            tensor.grad = grad.to(tensor.device) if self._on_host and grad is not None else grad
        self.optimizer.step()
        for name in self._copies:
            self._tensors[name].grad = None
        self._copy_back()

    def state(self) -> OptimizerState:
        """Returns each parameter's state tensors that have its shape (not copies), and the fp32 `master` of a
        half-precision parameter."""
        self._take_up_writes()
        found: OptimizerState = {}
        for name, tensor in self._tensors.items():
            own = self.optimizer.state.get(tensor, {})
            found[name] = {kind: value for kind, value in own.items() if _elementwise(kind, value, tensor)}
        for name in self._halves:
            found[name]["master"] = self._tensors[name]
        return found

    def extra(self) -> dict[str, Any]:
        """Returns what `state` omits: the class, the groups' options, and numbers such as torch's step count."""
        numbers = {
            name: {
                kind: value
                for kind, value in self.optimizer.state.get(tensor, {}).items()
                if not _elementwise(kind, value, tensor)
            }
            for name, tensor in self._tensors.items()
        }
        groups = [_options(group) for group in self.optimizer.param_groups]
        return {"class": self._class, "given": self._given, "groups": groups, "numbers": numbers}

    def check(self, extra: Mapping[str, Any]) -> None:
        """Rejects the state of another optimizer class, or of one with other options."""
        if extra.get("class") != self._class:
            raise CheckpointError(
                f"the checkpoint holds the state of {extra.get('class')}, but the optimizer here is {self._class}; "
                "give the same class, or load_optimizer_states=False to load without the optimizer's state"
            )
        if len(extra["given"]) != len(self._given):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(extra['given'])} parameter groups, but the one here has "
                f"{len(self._given)}; give the same groups, or load_optimizer_states=False"
            )
        for number, (saved, here) in enumerate(zip(extra["given"], self._given, strict=True)):
            changed = [name for name in here if name in saved and _plain(saved[name]) != _plain(here[name])]
            if changed:
                name = changed[0]
                raise CheckpointError(
                    f"{name} of parameter group {number} is {here[name]} here and {saved[name]} in the checkpoint; "
                    f"give the saved value (and change optimizer.param_groups[{number}][{name!r}] after "
                    "load_checkpoint), or load_optimizer_states=False"
                )

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], extra: Mapping[str, Any]) -> None:
        """Restores `state()` and `extra()`; half-precision parameters are rounded from their masters."""
        self.check(extra)
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        for group, saved in zip(self.optimizer.param_groups, extra["groups"], strict=True):
            group.update(saved)
            on_device = bool(group.get("fused") or group.get("capturable"))  # fused kernels read counters there
            for tensor in group["params"]:
                name = names[id(tensor)]
                kinds = {kind: value.to(tensor.device, copy=True) for kind, value in state[name].items()}
                if name in self._halves:
                    tensor.copy_(kinds.pop("master"))
                numbers = {
                    kind: value.to(tensor.device if on_device else "cpu", copy=True)
                    if isinstance(value, Tensor)
                    else value
                    for kind, value in extra["numbers"][name].items()
                }
                self.optimizer.state.pop(tensor, None)  # from updates after the checkpoint
                if kinds or numbers:
                    self.optimizer.state[tensor] = {**numbers, **kinds}
        self._copy_back()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for name in self._copies:
            self._tensors[name].copy_(self._grads.weight(name))

    @property
    def _class(self) -> str:
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _take(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Returns the tensor that the optimizer updates instead of `parameter`, and moves the existing state to it."""
        weight = self._weights[name] = self._grads.weight(name)
        tensor = weight
        if weight.dtype in HALF or self._on_host:
            dtype = torch.float32 if weight.dtype in HALF else weight.dtype
            tensor = weight.detach().to("cpu" if self._on_host else weight.device, dtype, copy=True)
        self._tensors[name] = tensor
        own = self.optimizer.state.pop(parameter, {})
        if own:
            self.optimizer.state[tensor] = {
                kind: self._grads.part_of(name, value.contiguous()).to(tensor.device, tensor.dtype, copy=True)
                if _elementwise(kind, value, parameter)
                else value
                for kind, value in own.items()
            }
        return tensor

    def _written(self) -> dict[str, tuple[int, int]]:
        """Returns the version counter and address of each parameter that has a copy. A change means that the program
        wrote to it; our own updates do not change torch's counter."""
        parameters = {name: self._grads.parameter(name) for name in self._copies}
        return {name: (one._version, one.data_ptr()) for name, one in parameters.items()}

    @torch.no_grad()
    def _take_up_writes(self) -> None:
        """Copies weights that the program has written since the last update (`load_state_dict`, `copy_`) into their
        masters. A master keeps each element whose rounded value equals the weight."""
        written = self._written()
        for name in self._copies:
            if written[name] != self._versions[name]:
                tensor = self._tensors[name]
                weight = self._weights[name].detach().to(tensor.device)
                tensor.copy_(torch.where(weight == tensor.to(weight.dtype), tensor, weight.to(tensor.dtype)))
        self._versions = written

    def _copy_back(self) -> None:
        if self._copies:
            weights = [self._grads.weight(name).data for name in self._copies]
            torch._foreach_copy_(weights, [self._tensors[name] for name in self._copies])


def _number_of_tensors(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def choose_fused(optimizer: torch.optim.Optimizer) -> None:
    """Selects torch's fused kernel on a CPU if the user left the choice to torch. (torch's default on a CPU is a
    loop over the parameters.)"""
    if type(optimizer) not in _HAVE_FUSED or any(optimizer.state.values()):
        return
    for group in optimizer.param_groups:
        free = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        if free and group["params"] and all(one.device.type == "cpu" for one in group["params"]):
            group["fused"] = True


def refuse_whole_matrices(optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer that needs whole parameters, because ranks update pieces of them."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _NEED_WHOLE:
            raise ConfigError(
                f"{kind.__name__}: needs whole parameters, but with zero_optimization.stage 1 and higher a rank "
                "updates pieces of them; use stage 0, or another optimizer"
            )


def _elementwise(kind: str, value: Any, tensor: Tensor) -> bool:
    return kind != _COUNTER and isinstance(value, Tensor) and value.shape == tensor.shape


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group as plain values."""
    return {name: _plain(value) for name, value in group.items() if name != "params"}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else value

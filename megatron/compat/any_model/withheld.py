"""Stand-in for `parameter.grad` where gradients are kept elsewhere: raises when it is used.

`None` would mean that there is no gradient: torch's `clip_grad_norm_` would clip nothing, and return 0.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError

_aten = torch.ops.aten
_ZEROS = (_aten.zero_.default, _aten._foreach_zero_.default)
_ADDITIONS = (_aten.add_.Tensor, _aten.add.Tensor)


class WithheldGrad(Tensor):
    """A tensor without memory that raises a ConfigError with the text `reason` when it is used."""

    reason: str
    came: Tensor | None = None
    """Gradient that a backward pass has added to this tensor."""

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, reason: str) -> "WithheldGrad":
        made: WithheldGrad = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.reason = reason
        return made

    def __init__(self, *_: Any) -> None:
        """No-op: `__new__` has made the tensor."""

    def take_what_came(self) -> Tensor | None:
        came, self.came = self.came, None
        return came

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.reason})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ZEROS:  # zero_grad(set_to_none=False) has nothing to clear here
            return args[0]
        held = next(one for value in args for one in _tensors(value) if isinstance(one, cls))
        if func in _ADDITIONS and args[0] is held and torch._C._current_graph_task_id() != -1:
            held.came = args[1]
            return held if func is _aten.add_.Tensor else args[1]
        raise ConfigError(held.reason)


class Withholding:
    """Replaces every `parameter.grad` by a `WithheldGrad` between passes, for models whose gradients autograd
    accumulates there."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        self._model, self._reason = model, reason
        self._kept: list[tuple[nn.Parameter, Tensor | None]] = []

    def begin(self) -> None:
        """Puts the stand-ins in place after a backward pass. (With ZeRO 2 and 3, a pass replaces the parameter
        objects.)"""
        self.end()
        self._kept = [(one, one.grad) for one in self._model.parameters() if one.requires_grad]
        for parameter, _ in self._kept:
            parameter.grad = WithheldGrad(parameter, self._reason)

    def end(self) -> None:
        for parameter, grad in self._kept:
            parameter.grad = grad
        self._kept = []


def _tensors(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)

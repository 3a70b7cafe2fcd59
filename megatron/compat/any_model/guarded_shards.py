"""Raises the engine's own errors if a program computes with weights while ranks shard them (ZeRO 2 and 3)."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError

_FROM_TORCH = ("mixed torch.Tensor and DTensor", "not supported for tensor subclasses")


def guard(shards: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
    """Makes operations that mix a shard with a plain tensor raise a ConfigError, and copies of `modules` too."""
    for parameter in shards.values():
        parameter.__class__ = _guarded_shard()
    for module in modules:
        module.__deepcopy__ = _refuse_copy  # type: ignore[assignment]


@cache
def _guarded_shard() -> Any:
    from torch.distributed.tensor import DTensor  # which takes long to import

    class GuardedShard(DTensor):
        """DTensor whose errors name the fix; torch's only report that it is not a plain tensor."""

        __slots__ = ()

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    result = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if any(text in str(error) for text in _FROM_TORCH):
                    raise divided_now(getattr(func, "__name__", str(func))) from error
                raise
            if type(result) is DTensor:  # results are guarded too: the program may combine them with plain tensors
                result.__class__ = cls
            return result

        def full_tensor(self, **named: Any) -> Tensor:
            whole: Tensor = super().full_tensor(**named)
            if whole.requires_grad:  # the gradient would count once, not once per rank
                whole.register_hook(_refuse_gradient)
            return whole

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            copied: Tensor = memo[id(self)]
            return copied

        def __reduce_ex__(self, _: Any) -> Any:
            raise ConfigError(
                "torch.save(): state_dict() holds this rank's part of weights that the ranks divide (ZeRO 2 and 3); "
                "call engine.whole_state_dict() on all ranks, and save that"
            )

    return GuardedShard


def divided_now(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: the ranks divide the model's weights (ZeRO 2 and 3) and gather them only for the passes of "
        "engine(x); compute it within the model's forward(), read values from engine.whole_state_dict(), or use "
        "zero_optimization.stage 1"
    )


def _refuse_gradient(_: Tensor) -> None:
    raise divided_now("full_tensor")


def _refuse_copy(_: Any) -> None:
    raise ConfigError(
        "copy.deepcopy(): the ranks divide the model's weights (ZeRO 2 and 3), and a copy would have only a part; "
        "copy the model before megatron.compat.initialize(), and fill the copy with "
        "load_state_dict(engine.whole_state_dict())"
    )

"""Gathers weights while the next forward pass runs, and waits for each where it is first needed.

The model is treated as a chain of modules. It consists of the modules registered before its repeated units
(embeddings), the units, and the modules registered after a unit (a final norm, a head). Units are the entries of
`nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential`. The first forward pass, before any update, checks this: a model
that uses its weights in another order is rejected.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron.data_parallel.buckets import Bucket
from megatron.errors import ConfigError


class LateGather:
    """Waits for the weights of `buckets` from within the model's forward pass."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters.values()}
        self._order = _Order(buckets)
        self.hooks = self._listen(model)

    def _listen(self, model: nn.Module) -> list[RemovableHandle]:
        units = list(repeated_units(model))
        inside = {parameter: number for number, unit in enumerate(units) for parameter in unit.parameters()}
        first: set[Bucket] = set()  # needed when the model's forward pass begins
        after: list[set[Bucket]] = [set() for _ in units]
        place = first
        for parameter in model.parameters():
            if parameter in inside:
                place = after[inside[parameter]]
            elif parameter in self._bucket_of:
                place.add(self._bucket_of[parameter])
        handles = [
            model.register_forward_pre_hook(lambda *_: self._order.begin()),
            model.register_forward_hook(lambda *_: self._order.end(), always_call=True),
            model.register_forward_pre_hook(self._wait_for(first)),
            model.register_state_dict_pre_hook(self._wait_for(self._bucket_of.values())),
        ]
        for unit, then in zip(units, after, strict=True):
            within = [self._bucket_of[parameter] for parameter in unit.parameters() if parameter in self._bucket_of]
            handles += [unit.register_forward_pre_hook(self._wait_for(within))]
            handles += [unit.register_forward_hook(self._wait_for(then))]
        return handles

    def _wait_for(self, buckets: Iterable[Bucket]) -> Callable[..., None]:
        needed = list({id(bucket): bucket for bucket in buckets}.values())

        def hook(*_: Any) -> None:
            for bucket in needed:
                bucket.finish_gather()
                self._order.due.pop(bucket.flatten_weights().untyped_storage()._cdata, None)

        return hook


class _Order(TorchDispatchMode):
    """Raises a ConfigError if the model uses a weight before the hook that waits for its bucket. Active until every
    bucket was waited for once."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__()
        self.due = {bucket.flatten_weights().untyped_storage()._cdata: bucket for bucket in buckets}
        self._within = 0

    def begin(self) -> None:
        if self.due:
            self.__enter__()
            self._within += 1

    def end(self) -> None:
        if self._within:
            self._within -= 1
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            bucket = self.due.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
            if bucket is not None:
                name = bucket.name_at(tensor.storage_offset())
                raise ConfigError(
                    f"--overlap-param-gather: the model uses {name} before it calls the module that registers {name}, "
                    "so the updated weight may not have arrived; remove --overlap-param-gather"
                )
        return func(*args, **(kwargs or {}))


def repeated_units(model: nn.Module) -> Iterator[nn.Module]:
    """Entries of the model's outermost containers of modules, such as its layers."""
    for child in model.children():
        listed = isinstance(model, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict):  # these two are never called
            yield child
        else:
            yield from repeated_units(child)

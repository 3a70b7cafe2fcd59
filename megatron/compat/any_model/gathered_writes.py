"""Detects changes to weights while they are gathered (ZeRO 2 and 3). Resharding would drop new values and changes of
requires_grad."""

from collections.abc import Container, Iterable, Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.errors import ConfigError


class GatheredWrites:
    """Finds writes by torch's version counters. `fully_shard` gathers into the same tensors every time, without
    changing their counters."""

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        """Registers hooks that see a unit while it is gathered. Must run before `fully_shard` adds its hooks."""
        self._path_of = {id(module): path for path, module in model.named_modules()}
        self._counts: dict[str, tuple[nn.Parameter, int]] = {}
        self._trained: dict[str, bool] = {}
        self._hooks: dict[int, RemovableHandle] = {id(unit): unit.register_forward_hook(self._count) for unit in units}

    def found(self) -> list[str]:
        """Returns the parameters that were written while they were gathered."""
        return [name for name, (parameter, count) in self._counts.items() if parameter._version != count]

    @property
    def gathered(self) -> set[int]:
        """Ids of the gathered parameters that have been seen."""
        return {id(parameter) for parameter, _ in self._counts.values()}

    def follow_freezing(self, shards: Mapping[str, nn.Parameter]) -> None:
        """Makes requires_grad of a gathered tensor and of its shard equal: both get the value that one of them got
        since the last call. (`fully_shard` gathers with the value of the shard.)"""
        for name, (gathered, _) in self._counts.items():
            shard, before = shards.get(name), self._trained[name]
            if shard is not None and not shard.requires_grad == gathered.requires_grad == before:
                self._trained[name] = not before
                shard.requires_grad_(not before)
                gathered.requires_grad_(not before)

    def _count(self, unit: nn.Module, *_: object) -> None:
        """Records the version counters in the first pass that trains; later passes gather into the same tensors."""
        for module in unit.modules():
            path = self._path_of.get(id(module))
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.is_inference():  # has no version counter and no gradient
                    return
                if path is not None and not hasattr(parameter, "device_mesh"):  # a DTensor is not gathered now
                    name = f"{path}.{own}" if path else own
                    self._counts.setdefault(name, (parameter, parameter._version))
                    self._trained.setdefault(name, parameter.requires_grad)
        self._hooks.pop(id(unit)).remove()


def refuse_new_parameters(model: nn.Module, known: Container[int]) -> None:
    """Raises a ConfigError for a parameter that was added after initialize(). `known`: ids of the parameters that the
    model had then."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known and not parameter.is_inference():
            raise ConfigError(
                f"{name} was added after megatron.compat.initialize(), so it would not be trained; write into the "
                "parameter that was there (copy_(), load_state_dict() without assign=True), or call initialize() "
                "after the change"
            )

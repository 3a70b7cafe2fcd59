"""Inventory of a model's modules and parameters, to detect changes after the model was made."""

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_CONTENTS = {"_parameters", "_modules", "_buffers"}
_NO_CHANGE = {"training", "as_made"}


def inventory(model: nn.Module) -> dict[str, object]:
    """Returns the class, attributes and hooks of every module, and the shape and hooks of every parameter and buffer.
    It does not record dtype, device, values or requires_grad, which may change."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        found[name] = type(module)
        for attribute, value in vars(module).items():
            if attribute not in _CONTENTS | _NO_CHANGE:
                found[f"{name}.{attribute}"] = _identity(value)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        hooks = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        found[name] = parameter.shape, hooks, names.setdefault(id(parameter), name)
    found.update((name, buffer.shape) for name, buffer in model.named_buffers())
    return found


def _identity(value: object) -> object:
    """Returns plain values and dictionary keys (some dictionaries hold hooks) by value, other objects by identity."""
    if isinstance(value, dict):
        return tuple(value)
    return value if isinstance(value, _PLAIN) else id(value)

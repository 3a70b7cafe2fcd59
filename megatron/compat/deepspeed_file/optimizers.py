"""Maps DeepSpeed's `optimizer` block, its type and parameters, to our settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.compat.deepspeed_file.reading import FileReading
from megatron.config.values import nearest
from megatron.errors import ConfigError

_START = "optimizer.params."
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum")
_OTHER_RATES = ("muon_lr", "adam_lr")


@dataclass(frozen=True)
class Kind:
    """Type of optimizer: our name for it, and the fields that each parameter sets. `left_out`: defaults of
    torch.optim's class (DeepSpeed's if torch has none) that differ from ours."""

    name: str
    fields: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, Any]


_COMMON = {"lr": ("lr",), "weight_decay": ("weight_decay",)}
_ADAM = {**_COMMON, "betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_eps",)}
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "AdamW": Kind("adam", _ADAM, {}),
        "Adam": Kind("adam", _ADAM, {"weight_decay": 0.0}),
        "SGD": Kind("sgd", {**_COMMON, "momentum": ("sgd_momentum",)}, {"weight_decay": 0.0, "sgd_momentum": 0.0}),
        "Lion": Kind(
            "lion",
            {**_COMMON, "betas": ("lion_beta1", "lion_beta2")},
            {"weight_decay": 0.0, "lion_beta1": 0.9, "lion_beta2": 0.99},
        ),
        "Muon": Kind(
            "muon",
            {**_ADAM, "momentum": ("muon_momentum",)},
            {
                "weight_decay": 0.0,
                "muon_momentum": 0.95,
                "muon_nesterov": True,
                "muon_scale_mode": "shape_scaling",
                "muon_coefficient_type": "simple",
            },
        ),
    }
)


def decide_optimizer(reading: FileReading) -> None:
    params = {key[len(_START) :]: value for key, value in reading.given.items() if key.startswith(_START)}
    typed = reading.given.get("optimizer.type")
    if typed is None:
        if not params.keys().isdisjoint((*_NUMBERS, *_OTHER_RATES, "adam_w_mode")):
            raise ConfigError('optimizer.params: optimizer.type is missing; add "type": "AdamW"')
        return
    spelled = reading.spelled("optimizer.type")
    name = {one.lower(): one for one in KINDS}.get(typed.lower())
    if name is None:
        raise ConfigError(f"{spelled}: not supported{nearest(typed, KINDS)}; use {', '.join(KINDS)}")
    kind = KINDS[name]
    reading.set("optimizer", kind.name, spelled)
    replaced = reading.stronger.get("optimizer", kind.name) != kind.name
    for field, value in kind.left_out.items():
        if not replaced and not any(
            field in fields and parameter in params for parameter, fields in kind.fields.items()
        ):
            reading.set(field, value, spelled)
    for parameter in _NUMBERS:
        if parameter in params:
            _set_parameter(reading, name, parameter, params[parameter])
    _decide_decay(reading, name, params)
    _decide_rates(reading, name, params)


def _set_parameter(reading: FileReading, name: str, parameter: str, value: Any) -> None:
    spelled = reading.spelled(_START + parameter)
    fields = KINDS[name].fields.get(parameter)
    if fields is None:
        raise ConfigError(f"{spelled}: {name} has no such parameter; remove it")
    values = value if len(fields) > 1 else [value]
    if len(values) != len(fields) or any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
        raise ConfigError(f"{_START}{parameter}: not {len(fields)} numbers; write them as in [0.9, 0.999]")
    for field, one in zip(fields, values):
        reading.set(field, one, spelled)


def _decide_decay(reading: FileReading, name: str, params: Mapping[str, Any]) -> None:
    if "adam_w_mode" not in params:
        return
    spelled = reading.spelled(_START + "adam_w_mode")
    if name == "Adam":
        reading.set("decoupled_weight_decay", params["adam_w_mode"], spelled)
    elif not params["adam_w_mode"]:
        raise ConfigError(f"{spelled}: {name} always decouples weight decay; remove it, or use the type Adam")


def _decide_rates(reading: FileReading, name: str, params: Mapping[str, Any]) -> None:
    """Sets the one rate of all parameters. DeepSpeed's Muon has two, for matrices and for the rest."""
    rates = {parameter: params[parameter] for parameter in ("lr", *_OTHER_RATES) if parameter in params}
    others = [parameter for parameter in rates if parameter != "lr"]
    if others and name != "Muon":
        raise ConfigError(f"{reading.spelled(_START + others[0])}: {name} has no such parameter; remove it")
    if len(set(rates.values())) > 1:
        named = " and ".join(reading.spelled(_START + parameter) for parameter in rates)
        raise ConfigError(f"{named}: one rate is used for all parameters; give them the same value, or only lr")
    if others and "lr" not in params:
        reading.set("lr", rates[others[0]], reading.spelled(_START + others[0]))

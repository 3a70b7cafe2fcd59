"""Plans which samples each evaluation of the validation data reads."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.blend import Blend, data_sources
from megatron.config.run import RunConfig
from megatron.config.sections.data import DataConfig
from megatron.errors import ConfigError

ONE_SET = "valid"
"""Name of a single validation set in metrics records."""
SET_PREFIX = "validation-"
"""Prefix of the name of one of several sets in metrics records."""


@dataclass(frozen=True)
class ValidationPlan:
    """Number of samples that every evaluation reads from the start of each set; None for all of them.

    Without a plan, every evaluation reads the next --eval-iters global batches, as in Megatron-LM.
    """

    samples: Mapping[str, int | None]

    def of(self, split: str) -> int | None:
        """Returns the number of samples to read from one set; None for all of them. `split`: the set's name in metrics
        records."""
        return self.samples[split.removeprefix(SET_PREFIX)]


def set_names(config: RunConfig) -> tuple[str, ...]:
    """Returns the names of the validation sets; a single name without --multiple-validation-sets."""
    blend = data_sources(config.data).blends[1]
    if not config.data.multiple_validation_sets or blend is None:
        return (ONE_SET,)
    return tuple(name for name, _ in named_sets(config.data, blend))


def named_sets(config: DataConfig, blend: Blend) -> list[tuple[str, str]]:
    """Returns (name, prefix) of each validation set. Without --validation-set-names the names are 0, 1, ..."""
    names = config.validation_set_names or [str(number) for number in range(len(blend.prefixes))]
    return list(zip(names, blend.prefixes, strict=True))


def validation_plan(config: RunConfig, batch_size: int) -> ValidationPlan | None:
    """Returns the plan; None if no setting fixes the samples. `batch_size`: samples per evaluation step, by which
    --eval-iters is multiplied."""
    evaluation, names = config.evaluation, set_names(config)
    asked = asked_samples(config)
    if asked is None and not evaluation.full_validation:
        if not config.data.multiple_validation_sets:
            return None
        return ValidationPlan(dict.fromkeys(names, evaluation.eval_iters * batch_size))
    return ValidationPlan({name: (asked or {}).get(name) for name in names})


def asked_samples(config: RunConfig) -> dict[str, int] | None:
    """Returns --validation-samples by set; None if not given. Raises a ConfigError if it is not valid."""
    words, names = config.evaluation.validation_samples, set_names(config)
    if words is None:
        return None
    flag = f"--validation-samples {' '.join(words)}"
    if len(words) == 1 and "=" not in words[0]:
        return dict.fromkeys(names, _count(flag, words[0]))
    several = config.data.multiple_validation_sets
    found: dict[str, int] = {}
    for word in words:
        name, equals, count = word.rpartition("=")
        if not equals:
            raise ConfigError(f"{flag}: {word!r} is not NAME=N; give one number for all sets, or NAME=N for each")
        if not several:
            raise ConfigError(f"{flag}: there is one validation set; give only its number of samples")
        if name not in names:
            raise ConfigError(f"{flag}: no validation set is called {name!r}; the sets are {', '.join(names)}")
        if name in found:
            raise ConfigError(f"{flag}: the set {name!r} is given twice; give it one number")
        found[name] = _count(flag, count)
    missing = [name for name in names if name not in found]
    if missing and not config.evaluation.full_validation:
        raise ConfigError(
            f"{flag}: no number for {', '.join(missing)}; add {missing[0]}=N, or --full-validation to read the "
            "other sets whole"
        )
    return found


def _count(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:19]) > 0 and len(text) < 19):
        raise ConfigError(f"{flag}: {text!r} is not a number of samples; give a whole number of at least 1")
    return int(text)

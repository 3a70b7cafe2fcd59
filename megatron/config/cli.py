"""The training command line: reads flags in Megatron's spelling, presets and YAML into one RunConfig."""

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from megatron.config.checks import check_settings
from megatron.config.flag import Setting
from megatron.config.help import train_help
from megatron.config.notices import notices_of
from megatron.config.presets import PRESETS, preset_meant
from megatron.config.refusals import Refusals, UnknownSettingError
from megatron.config.run import RunConfig, build
from megatron.config.sources import (
    Assignments,
    Given,
    SettingsSource,
    Target,
    canonical_spellings,
    file_assignments,
    no_other_file,
    spelling_table,
    unknown_setting,
)
from megatron.errors import ConfigError
from megatron.utils.command_line import print_help
from megatron.version import __version__

_COMMA_LISTS = ("--split",)  # flags whose one value is a list of numbers


def parse_args(
    argv: Sequence[str] | None = None, *, needs_data: bool = True, other_file: SettingsSource = no_other_file
) -> RunConfig:
    """Returns the checked settings of a training run; a ConfigError has one line for each mistake.

    With `needs_data=False` the script makes its own datasets, so neither a data path nor a tokenizer is required. The
    result's `notices` are lines to print once, and `origins` has the source of each value. `other_file` reads another
    program's file.
    """
    refusals = Refusals()
    config = merge_sources(argv, refusals, other_file)
    check_settings(config, needs_data=needs_data, complete=not config.checkpoint.use_checkpoint_args, refusals=refusals)
    refusals.end()
    return config


def merge_sources(
    argv: Sequence[str] | None, refusals: Refusals, other_file: SettingsSource = no_other_file
) -> RunConfig:
    """Merges the sources (default < preset < files < flag). Does not check settings against each other. A setting with
    a rejected value keeps its default."""
    flags = Assignments(origin="flag")
    for given in tokenize(sys.argv[1:] if argv is None else argv, refusals):
        with refusals.of_reading():
            flags.add(given, spelling_table()[given.spelling])
    sources = [flags]
    if flags.values.get("config") is not None:
        sources.insert(0, file_assignments(flags.values["config"], refusals))
    others = other_file(sources, refusals)
    if others is not None:
        sources.insert(0, others)
    refusals.end_if_unknown()
    name = next((source.values["model"] for source in reversed(sources) if "model" in source.values), None)
    if name is not None:
        with refusals.of_reading():
            sources.insert(0, _preset(name))
    if refusals.doubts("--config", "--yaml-cfg", "--deepspeed_config", "--model"):
        refusals.end()  # most settings are unknown, so checks would report consequences only
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        values.update(source.values)
        origins.update({name: source.origin_of(name) for name in source.values})
    config = build(values, origins=origins)
    lines = [line for source in sources for line in source.notices]
    with refusals.of_checking():
        lines += notices_of(config)
    return build(values, origins=origins, notices=tuple(dict.fromkeys(lines)))


def _preset(name: str) -> Assignments:
    if name not in PRESETS:
        raise ConfigError(f"--model {name}: no such preset{preset_meant(name)}; choose from {', '.join(PRESETS)}")
    return Assignments(origin=f"preset {name}", values=dict(PRESETS[name]))


def tokenize(argv: Sequence[str], refusals: Refusals) -> list[Given]:
    """Splits argv into flags with raw values. Records errors for unknown flags and unexpected arguments."""
    if "--version" in argv:
        raise SystemExit(print_help(f"megatron {__version__}, torch {version('torch')}, Python {python_version()}"))
    if (text := train_help(sys.argv[0]).answer(argv)) is not None:
        raise SystemExit(print_help(text))
    given: list[Given] = []
    starts = [place for place, word in enumerate(argv) if _is_flag(word)]
    if argv and 0 not in starts:
        refusals.refuse(_stray(argv[0], ()))
    for start, end in zip(starts, [*starts[1:], len(argv)]):
        with refusals.of_reading():
            given.append(_read(argv[start], argv[start + 1 : end]))
    return given


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) > 1 and word[0] == "-" and not _is_negative_number(word))


def _read(word: str, after: Sequence[str]) -> Given:
    """Parses one flag. `after`: the words between it and the next flag."""
    name, equals, attached = word.partition("=")
    spelling = canonical_spellings().get(f"--{name.lstrip('-')}".replace("_", "-"))
    if spelling is None:
        raise unknown_setting(name if name.startswith("--") else f"-{name}")
    if not name.startswith("--"):
        raise ConfigError(f"{word}: flags begin with two dashes; give -{word}")
    target = spelling_table()[spelling]
    if _is_switch(target):
        if after:
            raise _stray(after[0], [word])
        return Given(spelling, _switch_value(spelling, attached) if equals else True)
    values = [attached, *after] if equals else list(after)
    wanted = _values_wanted(target)
    count = max(1, len(values)) if wanted == "+" else int(wanted or 1)
    if len(values) < count:
        how_many = "at least one value" if wanted == "+" else f"{wanted} values" if wanted else "one value"
        example = " ".join([spelling, *["VALUE"] * count])
        raise ConfigError(f"{spelling}: needs {how_many}, as in {example}; see --help")
    if len(values) > count and spelling in _COMMA_LISTS and all(map(_is_number, values)):
        joined = ",".join(word.rstrip(",") for word in values)
        raise ConfigError(f"{spelling} {' '.join(values)}: one value is needed; use {spelling} {joined}")
    if len(values) > count:
        raise _stray(values[count], [word, *after[: count - bool(equals)]])
    return Given(spelling, values[0] if wanted is None else values)


def _stray(word: str, before: Sequence[str]) -> ConfigError:
    place = f" after {' '.join(before)}" if before else ""
    if word.endswith((".yaml", ".yml", ".json")) and Path(word).is_file():
        return UnknownSettingError(f"unexpected argument '{word}'{place}: did you mean --config {shlex.quote(word)}?")
    return ConfigError(f"unexpected argument '{word}'{place}: remove it, or quote it together with the value before it")


def _is_negative_number(word: str) -> bool:
    return re.fullmatch(r"-[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?", word) is not None


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[0-9]*\.?[0-9]+,?", word) is not None


def _is_switch(target: Target) -> bool:
    return target.is_switch if isinstance(target, Setting) else target.takes == "switch"


def _switch_value(spelling: str, text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ConfigError(f"{spelling}={text}: a switch is true or false; give only {spelling}, or {spelling}=false")


def _values_wanted(target: Target) -> int | str | None:
    """Returns how many values a flag takes: a number, "+" for one or more, or None for a single value."""
    if isinstance(target, Setting):
        return target.flag.nargs
    return "+" if target.takes == "values" else None

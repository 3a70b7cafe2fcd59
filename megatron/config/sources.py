"""Reads the values of one source (the command line or a YAML file) into `Assignments`, one value per field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

from megatron.config.flag import Setting
from megatron.config.megatron_lm_flags import (
    CompatFlag,
    RetiredFlag,
    apply_compat,
    compat_flags,
    refused_family,
    retired_flags,
)
from megatron.config.other_programs import answers, given_elsewhere
from megatron.config.refusals import Refusals, UnknownSettingError
from megatron.config.run import SECTIONS, all_settings, settings_by_name
from megatron.config.values import nearest, parse_switch, parse_value, show
from megatron.config.yaml_file import read_yaml
from megatron.errors import ConfigError
from megatron.utils.nearest_flag import misspelt, nearest_flag

Target = Setting | RetiredFlag | CompatFlag


@dataclass(frozen=True)
class Given:
    """One setting as the user wrote it: the spelling, and True, False or the raw value."""

    spelling: str
    raw: Any


@cache
def spelling_table() -> Mapping[str, Target]:
    """Returns every accepted spelling with its setting or compatibility flag."""
    table: dict[str, Target] = {spelling: s for s in all_settings() for spelling in s.spellings}
    for extra in (retired_flags(), compat_flags()):
        assert not table.keys() & extra.keys(), table.keys() & extra.keys()
        table.update(extra)
    return MappingProxyType(table)


@cache
def canonical_spellings() -> Mapping[str, str]:
    """Returns spelling with dashes -> spelling in the table. A few of Megatron's flags are spelled with underscores."""
    return MappingProxyType({spelling.replace("_", "-"): spelling for spelling in spelling_table()})


@cache
def _that_work() -> tuple[str, ...]:
    """Returns the spellings of supported settings, which errors may suggest."""
    return tuple(
        s for s, target in spelling_table().items() if isinstance(target, Setting) and target.flag.status == "works"
    )


def unknown_setting(name: str) -> UnknownSettingError:
    near, elsewhere = nearest_flag(name, _that_work()), given_elsewhere(name)
    if near is None and elsewhere is None and (meant := misspelt(name, [f"--{word}" for word in answers()])):
        elsewhere = given_elsewhere(meant)
    hint = f" ({elsewhere})" if elsewhere else f" (did you mean {near}?)" if near else ""
    family = refused_family(name)
    if family:
        return UnknownSettingError(f"{name}{hint}: {family}")
    return UnknownSettingError(f"{name}: unknown setting{hint}; see --help or docs/flags.md")


@dataclass
class Assignments:
    """The values of one source by field name, and the lines to print about them."""

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)
    """Field name -> the flag or key with its text, as the user wrote it."""
    named_by_key: bool = False
    """True if the origin of a value also names its key, because the messages of checks name flags."""

    def origin_of(self, name: str) -> str:
        return f"key {self.spelled[name]} of {self.origin}" if self.named_by_key else self.origin

    def set(self, setting: Setting, value: Any, spelled: str) -> None:
        """Sets a value. If a flag is given twice with different values, the last one counts and a notice is printed:
        scripts append "$@" for the user's flags. Two spellings with different values are rejected."""
        if setting.name in self.values and self.values[setting.name] != value:
            before = self.spelled[setting.name]
            if before.split()[0] != spelled.split()[0]:
                raise ConfigError(f"{before} and {spelled} contradict each other; keep one of them")
            self.notices.append(f"{spelled}: replaces {before}, which was given before")
        self.values[setting.name] = value
        self.spelled[setting.name] = spelled

    def add(self, given: Given, target: Target) -> None:
        text = "" if given.raw is True else show(given.raw)
        spelled = f"{given.spelling} {text}".rstrip()
        if not isinstance(target, Setting) and given.raw is False:
            return  # `--deepspeed=false`, or `deepspeed: false` in a file
        if isinstance(target, CompatFlag):
            line = apply_compat(target, text)
            if line is not None:
                self.notices.append(line)
        elif isinstance(target, RetiredFlag):
            for name, value in target.values.items():
                raw = given.raw if value is None else value
                setting = settings_by_name()[name]
                self.set(setting, _interpret_retired(Given(given.spelling, raw), setting, spelled), spelled)
            self.notices.append(f"{spelled}: {target.note}")
        else:
            value = interpret(given, target)
            if target.flag.status == "no-op" and value != target.default:
                self.notices.append(f"{spelled}: {target.flag.note}")
            if target.flag.also and text in target.flag.also:
                self.notices.append(f"{spelled}: taken as {value}")
            if given.spelling in target.flag.aliases and given.spelling != target.spelling:
                self.notices.append(f"{given.spelling}: taken as {target.spelling}")
            self.set(target, value, spelled)


class SettingsSource(Protocol):
    """Reads another program's settings file. The command line or the --config file names that file."""

    def __call__(self, others: Sequence[Assignments], refusals: Refusals) -> Assignments | None:
        """Returns the file's values; None if no file is named. `others`: sources that override it, in order."""


def value_of(sources: Sequence[Assignments], name: str) -> Any:
    """Returns the value from the source with the highest precedence, which is the last."""
    return next((source.values[name] for source in reversed(sources) if name in source.values), None)


def no_other_file(others: Sequence[Assignments], refusals: Refusals) -> None:
    """Rejects a DeepSpeed file, for entry points that do not read one."""
    path = value_of(others, "deepspeed_config")
    if path is not None and value_of(others, "deepspeed"):
        refusals.refuse(
            ConfigError(
                f"--deepspeed_config {path}: this program does not read it; use megatron.pretrain, or give flags"
            )
        )


def _interpret_retired(given: Given, setting: Setting, spelled: str) -> Any:
    """Interprets the value of a retired spelling. Error messages also name the retired spelling."""
    try:
        return interpret(given, setting)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(given.spelling) else f"{spelled}: {text}") from None


def interpret(given: Given, setting: Setting) -> Any:
    """Parses the value, and rejects what this version does not support."""
    later = setting.flag.status in ("later", "never")
    try:
        if setting.is_switch:
            on = parse_switch(setting, given.raw)
            turns_off = bool(setting.flag.off) and given.spelling in setting.spellings
            value: Any = not on if turns_off else on
        else:
            value = parse_value(setting, given.raw)
    except ConfigError:
        if not later:
            raise
        value = given.raw  # any value selects something that is not supported
    if later and value != setting.default and value not in setting.flag.neutral:
        spelled = given.spelling if setting.is_switch else f"{given.spelling} {show(given.raw)}"
        verdict = "not supported yet" if setting.flag.status == "later" else "not supported"
        raise ConfigError(f"{spelled}: {verdict}; {setting.flag.note}")
    return value


def _flatten(path: str, content: Mapping[Any, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        grouped = isinstance(value, dict)
        if grouped and key not in SECTIONS:
            hint = nearest(str(key), SECTIONS)
            raise ConfigError(f"--config {path}: '{key}' is not a section{hint}; sections are {', '.join(SECTIONS)}")
        for name, inner in value.items() if grouped else [(key, value)]:
            spelling = str(name).lstrip("-").replace("_", "-")
            if spelling in flat and flat[spelling] != inner:
                raise ConfigError(f"--config {path}: '{name}' is set twice to different values; keep one")
            flat[spelling] = inner
    return flat


def file_assignments(path: str, refusals: Refusals) -> Assignments:
    """Returns the values of a YAML file. Its keys are flag or field names with dashes or underscores."""
    assignments = Assignments(origin=f"file {path}")
    settings: dict[str, Any] = {}
    with refusals.of_reading():
        settings = _flatten(path, read_yaml(path))
    for key, raw in settings.items():
        try:
            _add_from_file(assignments, key, raw)
        except ConfigError as error:
            refusals.refuse(ConfigError(f"in {path}: {error}"))
    return assignments


def _add_from_file(assignments: Assignments, key: str, raw: Any) -> None:
    spelling, setting = canonical_spellings().get("--" + key), settings_by_name().get(key.replace("-", "_"))
    if spelling is not None:
        target = spelling_table()[spelling]
        if raw is None:
            return  # "key:" without a value has no effect, like a missing line
        if not isinstance(target, Setting) and target.takes == "switch" and not isinstance(raw, bool):
            raise ConfigError(f"{spelling} {show(raw)}: a switch is true or false; write one of them")
        assignments.add(Given(spelling, raw), target)
    elif setting is None:
        raise unknown_setting("--" + key)
    elif raw is not None:  # `bias_gelu_fusion: false`, the positive name of a --no-X switch
        assignments.set(setting, interpret(Given("--" + key, raw), setting), f"--{key} {show(raw)}")

"""Reads a configuration: each key is checked by its row of the table, and sets a field or becomes a notice."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.compat.deepspeed_file.keys import Key, wrong_kind
from megatron.compat.deepspeed_file.members import members_of
from megatron.compat.deepspeed_file.table import children, is_default, is_off, keys_by_path
from megatron.config.refusals import Refusals
from megatron.config.run import settings_by_name
from megatron.config.sources import Assignments, Given, interpret
from megatron.config.values import nearest, show
from megatron.errors import ConfigError


@dataclass
class DeepSpeedSettings(Assignments):
    """Settings from a DeepSpeed configuration. Keys that the configuration does not have are in none of the mappings.

    `origin` is the file, or the configuration's name in messages; each notice begins with it.
    """

    named_by_key: bool = True
    content: dict[str, Any] = field(default_factory=dict)
    """Key with dots -> its value, without null and "auto"."""


@dataclass
class FileReading:
    """State while a configuration is read. Functions that read several keys together (blocks.py) also use it."""

    settings: DeepSpeedSettings
    refusals: Refusals
    stronger: Mapping[str, Any]
    """Values from flags and other files, by field, which override this file's."""
    left: set[str] = field(default_factory=set)
    """Keys whose value is left to the flags: "auto" and null."""

    @property
    def given(self) -> dict[str, Any]:
        """Key with dots -> its value in the file, without null and "auto"."""
        return self.settings.content

    @contextmanager
    def naming(self, *doubted: str) -> Iterator[None]:
        """Collects an error raised inside, prefixed by the file. `doubted`: flags whose values are unknown after the
        error."""
        try:
            yield
        except ConfigError as error:
            self.refusals.refuse(ConfigError(f"in {self.settings.origin}: {error}"), *doubted)

    def say(self, text: str) -> None:
        self.settings.notices.append(f"{self.settings.origin}: {text}")

    def spelled(self, path: str) -> str:
        return f"{path} {_brief(self.given[path])}"

    def set(self, field: str, value: Any, spelled: str) -> None:
        """Sets a field. `spelled`: the key and its value, for messages."""
        setting = settings_by_name()[field]
        if value is not None:
            try:
                value = interpret(Given(spelled.split()[0], value), setting)
            except ConfigError as error:
                text = str(error)
                named, _, reason = text.partition(": ")  # the flag or the key, and the value
                if not named.startswith((spelled.split()[0], setting.spelling)):
                    reason = text
                elif spelled.partition(" ")[2].startswith("["):
                    reason = f"{named.split()[-1]}: {reason}"  # names only the wrong item of a list
                raise ConfigError(f"{spelled}: {reason}") from None
        self.settings.set(setting, value, spelled)

    def walk(self, path: str, block: Mapping[Any, Any]) -> None:
        """Reads the keys of a block."""
        switch = keys_by_path().get(f"{path}.enabled") if path else None
        off = switch is not None and is_off(block.get("enabled")) and not self.stronger.get(switch.field)
        for name, value in block.items():
            fields = _fields_of(f"{path}.{name}" if path else str(name))
            with self.naming(*(settings_by_name()[one].spelling for one in fields)):
                self._read(path, name, value, idle=off and name != "enabled")
        if off:
            self._say_idle(path, block)

    def _say_idle(self, path: str, block: Mapping[Any, Any]) -> None:
        """Reports the keys of a block that is switched off."""
        idle = [f"{path}.{name}" for name, value in block.items() if name != "enabled" and not is_default(value)]
        if idle:
            self.say(f"{', '.join(idle)}: no effect while {path}.enabled is not true")

    def _read(self, parent: str, name: Any, value: Any, *, idle: bool) -> None:
        """Checks and applies a key. `idle`: its block is switched off, so it is checked but not applied."""
        path = f"{parent}.{name}" if parent else str(name)
        key = keys_by_path().get(path) if isinstance(name, str) and "." not in name else None
        if key is None:
            raise _unknown(parent, name)
        if is_default(value):
            self.left.add(path)
            return
        wrong = wrong_kind(key.kind, value)
        if wrong is not None:
            raise ConfigError(f"{path} {_quoted(value)}: {wrong}; correct it, or remove it")
        if key.has_rows:
            self.walk(path, value)
        elif not idle:
            self.given[path] = value
            self._apply(key, value)

    def _apply(self, key: Key, value: Any) -> None:
        spelled = key.path if key.kind == "block" else self.spelled(key.path)
        if key.kind == "block":
            _check_members(key.path, value)
            if not value or is_off(value.get("enabled", True)):  # no flag can enable this block
                self._say_idle(key.path, value)
                return
        if key.way_out:
            if value not in key.neutral:
                raise ConfigError(f"{spelled}: not supported; {key.way_out}")
        elif key.line:
            self.say(f"{spelled}: {key.line}")
        elif key.field:
            try:
                self.set(key.field, value if key.becomes is None else key.becomes(value), spelled)
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(f"{spelled}: not supported; {error}") from None


def _fields_of(path: str) -> tuple[str, ...]:
    """Returns the field that a key sets, if it sets only one. A wrong optimizer block leaves the rate unknown."""
    if path in ("optimizer", "optimizer.type", "optimizer.params"):
        return ("lr",)
    key = keys_by_path().get(path)
    field = "" if key is None else key.field or path.rpartition(".")[2]
    return (field,) if field in settings_by_name() else ()


def _check_members(path: str, block: Mapping[Any, Any]) -> None:
    """Rejects keys that DeepSpeed does not have, in a block without rows of its own."""
    members = members_of(path)
    for name, value in block.items() if members else ():
        if name not in members:
            hint = nearest(str(name), list(members))
            raise ConfigError(f"{path}.{_brief(name)}: unknown key{hint}; correct it, or remove it")
        kind = members[name]
        wrong = None if kind is None or is_default(value) else wrong_kind(kind, value)
        if wrong is not None:
            raise ConfigError(f"{path}.{name} {_quoted(value)}: {wrong}; correct it, or remove it")
        if isinstance(value, Mapping):
            _check_members(f"{path}.{name}", value)


def _unknown(parent: str, name: Any) -> ConfigError:
    """Returns an error that suggests the nearest key of the block, or the block that has a key of this name."""
    word = str(name)
    hint = nearest(word, children(parent))
    elsewhere = [path for path in keys_by_path() if path.rpartition(".")[2] == word]
    if elsewhere:
        hint = f" (it belongs to {elsewhere[0].rpartition('.')[0] or 'the top level'})"
    path = f"{parent}.{_brief(name)}" if parent else _brief(name)
    return ConfigError(f"{path}: unknown key{hint}; correct it, or remove it; docs/from_deepspeed.md has a list")


def _quoted(value: Any) -> str:
    """Formats a value of a wrong type: quotes show that it is text."""
    return f'"{_brief(value)}"' if isinstance(value, str) and value.isprintable() else _brief(value)


def _brief(value: Any, depth: int = 0) -> str:
    """Formats any value in a few characters on one line."""
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_brief(item, depth + 1) for item in value[:4])}]" if depth < 2 else "[...]"
    if isinstance(value, bool | int | float):
        return show(value)
    text = str(value) if isinstance(value, str) else repr(value)
    return (text if text.isprintable() else ascii(text))[:80]

"""How a dataclass field says what its flag is called, what it accepts and whether this version can do it.

A section is an ordinary frozen dataclass; each field is declared with `flag(default, help, ...)`, which is
`dataclasses.field` with a `Flag` in its metadata. The command line, the YAML reader, the checks and docs/flags.md
are all generated from these declarations, so a setting is described in exactly one place.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["works", "no-op", "later", "never"]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What the command line has to know about one field."""

    help: str
    status: Status = "works"
    note: str = ""  # no-op: what it means now; later/never: the way out
    spelling: str = ""  # when it is not the field name with dashes
    off: str = ""  # the spelling that sets a boolean to False (`--no-bias-gelu-fusion`)
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    nargs: int | str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    neutral: tuple[Any, ...] = ()  # later/never: accepted values besides the default
    refused: dict[str, str] | None = None  # known values that this project does not do -> the way out
    required: bool = False  # the default (0 or "") only means "not given"
    cli_only: bool = False  # says how to run, not what to compute: never written into a checkpoint


def flag(default: Any, help: str, **options: Any) -> Any:
    """A dataclass field with its command-line description."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help=help, **options)})


@dataclass(frozen=True)
class Setting:
    """One field of one section, with everything derived from its declaration."""

    section: str
    name: str
    flag: Flag
    default: Any
    base: type  # bool, int, float or str
    optional: bool  # None is a value (always "not given")
    many: bool  # a tuple of `base`

    @property
    def spelling(self) -> str:
        """The spelling shown to the user: for a default-on switch, the one that turns it off."""
        return self.flag.off or self.flag.spelling or "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.spelling, *self.flag.aliases)

    @property
    def is_switch(self) -> bool:
        return self.base is bool

    @property
    def has_default(self) -> bool:
        """Is the default a value to show? (None, False, and a 0 where at least 1 is asked for, mean "not given".)"""
        too_small = self.flag.at_least is not None and not self.many and (self.default or 0) < self.flag.at_least
        return not self.is_switch and self.default is not None and not too_small


def _analyse(annotation: Any) -> tuple[type, bool, bool]:
    """(base type, optional, many) of a field's annotation."""
    optional = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        assert len(members) == 1, annotation
        annotation, optional = members[0], True
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], optional, True
    assert annotation in (bool, int, float, str), annotation
    return annotation, optional, False


def settings_of(section: str, cls: type) -> Iterator[Setting]:
    """The settings of one section class, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        base, optional, many = _analyse(hints[field.name])
        yield Setting(section, field.name, field.metadata["flag"], field.default, base, optional, many)

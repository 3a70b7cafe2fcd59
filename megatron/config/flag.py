"""Declares settings: a section is a frozen dataclass whose fields are made by `flag(default, help, ...)`.

`flag` is `dataclasses.field` with a `Flag` in its metadata: spelling, accepted values, status, needs and conflicts. The
command line, the YAML reader, the checks, the notices and docs/flags.md are generated from these declarations.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.utils.numerals import LARGEST

Status = Literal["works", "no-op", "later", "never"]


@dataclass(frozen=True)
class Need:
    """Condition without which a setting has no effect. `text` names it in messages; `met` tests a RunConfig."""

    text: str
    met: Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True)
class Exclude:
    """Setting or condition that conflicts with the setting that declares this object."""

    other: str | Need
    """Name of the other setting, which conflicts if it is not at its default; or a condition."""
    why: str = ""
    way_out: str = "keep one of them"
    given: bool = False
    """True: the other setting conflicts if the user gave it, even with its default value."""
    own: Callable[[Any], bool] | None = None
    """Tests whether the declaring setting conflicts in a RunConfig. None: it conflicts if it is not at its default."""


def excludes(*others: str | Need, **options: Any) -> tuple[Exclude, ...]:
    return tuple(Exclude(other=other, **options) for other in others)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The command-line description of one field."""

    help: str
    status: Status = "works"
    note: str = ""  # no-op: the reason why it has no effect; later/never: the fix
    spelling: str = ""  # "": the field name with dashes
    off: str = ""  # the spelling that sets a boolean to False (`--no-bias-gelu-fusion`)
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    also: Mapping[str, str] | None = None  # other trainers' name of a choice -> the choice
    nargs: int | str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    neutral: tuple[Any, ...] = ()  # later/never: accepted values besides the default
    refused: dict[Any, str] | None = None  # known but unsupported values -> the reason and fix
    required: bool = False  # the default (0 or "") only means "not given"
    cli_only: bool = False  # concerns this launch only: never written into a checkpoint
    path: bool = False  # names a file or folder: may differ between machines
    needs: tuple[Need, ...] = ()  # conditions without which it has no effect
    excludes: tuple[Exclude, ...] = ()  # conflicts, declared on one of the two settings
    insists: bool = False  # an unmet need is an error, not a notice


def flag(default: Any, help: str, **options: Any) -> Any:
    """Returns a dataclass field with a `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help=help, **options)})


@dataclass(frozen=True)
class Setting:
    """One field of one section, with the properties derived from its declaration."""

    section: str
    name: str
    flag: Flag
    default: Any
    base: type  # bool, int, float or str
    many: bool  # a tuple of `base`

    @property
    def spelling(self) -> str:
        """Spelling shown to users. For a switch that is on by default, the spelling that turns it off."""
        return self.flag.off or self.flag.spelling or "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.spelling, *self.flag.aliases)

    @property
    def largest(self) -> float | None:
        """The largest accepted number. Every integer setting has one."""
        if self.flag.at_most is None and self.base is int:
            return LARGEST
        return self.flag.at_most

    @property
    def is_switch(self) -> bool:
        return self.base is bool

    @property
    def has_default(self) -> bool:
        """True if the default is worth showing. None, False, and 0 below `at_least` mean "not given"."""
        too_small = self.flag.at_least is not None and not self.many and (self.default or 0) < self.flag.at_least
        return not self.is_switch and self.default is not None and not too_small


def _analyse(annotation: Any) -> tuple[type, bool]:
    """Returns (base type, True if the field is a tuple of that type). `| None` is ignored: None means "not given"."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        assert len(members) == 1, annotation
        annotation = members[0]
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    assert annotation in (bool, int, float, str), annotation
    return annotation, False


def settings_of(section: str, cls: type) -> Iterator[Setting]:
    """Yields a section class's settings in the order of declaration. If the class has a method `needs_of(name)`, that
    method returns the needs of each field with the status "works"."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        base, many = _analyse(hints[field.name])
        declared = field.metadata["flag"]
        if declared.status == "works" and hasattr(cls, "needs_of"):
            declared = dataclasses.replace(declared, needs=cls.needs_of(field.name))
        yield Setting(section, field.name, declared, field.default, base, many)

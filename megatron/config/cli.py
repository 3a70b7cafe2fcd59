"""The command line: every section's fields as flags in Megatron's spelling, read into one RunConfig."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

from megatron.config.checks import check
from megatron.config.flag import Setting
from megatron.config.known import KnownFlag, Retired
from megatron.config.meaning import notices_of
from megatron.config.presets import PRESETS
from megatron.config.run import SECTIONS, RunConfig, all_settings, build
from megatron.config.sources import (
    Assignments,
    Given,
    Target,
    canonical_spellings,
    file_assignments,
    refuse_unknown,
    spelling_table,
)
from megatron.config.values import nearest, show
from megatron.errors import ConfigError


def parse_args(
    argv: Sequence[str] | None = None, *, description: str | None = None, needs_data: bool = True
) -> RunConfig:
    """The configuration of a training run, checked; every mistake is a ConfigError of one line.

    `needs_data=False` is for a script that brings its own datasets, and so needs neither data path nor tokenizer.
    Lines the user should see once are in `.notices`; where each value came from is in `.origins`.
    """
    config = resolve(list(sys.argv[1:] if argv is None else argv), description)
    check(config, needs_data=needs_data, complete=not config.checkpoint.use_checkpoint_args)
    return config


def resolve(argv: list[str], description: str | None = None) -> RunConfig:
    """Merge the sources (default < preset < file < flag) without the checks across settings."""
    flags = Assignments(origin="flag")
    for given in tokenize(argv, description):
        flags.add(given, spelling_table()[given.spelling])
    sources = [flags]
    if flags.values.get("config") is not None:
        sources.insert(0, file_assignments(flags.values["config"]))
    name = next((source.values["model"] for source in reversed(sources) if "model" in source.values), None)
    if name is not None:
        sources.insert(0, _preset(name))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        values.update(source.values)
        origins.update(dict.fromkeys(source.values, source.origin))
    config = build(values, origins=origins)
    lines = [line for source in sources for line in source.notices]
    return build(values, origins=origins, notices=tuple(dict.fromkeys([*lines, *notices_of(config)])))


def _preset(name: str) -> Assignments:
    if name not in PRESETS:
        raise ConfigError(f"--model {name}: no such preset{nearest(name, PRESETS)}; choose from {', '.join(PRESETS)}")
    return Assignments(origin=f"preset {name}", values=dict(PRESETS[name]))


def tokenize(argv: Sequence[str], description: str | None = None) -> list[Given]:
    """argv -> what was given, with every spelling as it is in the table. Unknown flags are refused here."""
    given, rest = _normalize(argv)
    namespace, stray = make_parser(description).parse_known_args(rest, argparse.Namespace(given=given))
    if stray:
        raise _refuse_stray(stray[0], argv)
    result: list[Given] = namespace.given
    return result


def _refuse_stray(word: str, argv: Sequence[str]) -> ConfigError:
    if word.startswith("-") and not _is_negative_number(word):
        flag = f"--{word.lstrip('-')}"
        if flag.partition("=")[0].replace("_", "-") in canonical_spellings():
            return ConfigError(f"{word}: flags begin with two dashes; give {flag}")
        return refuse_unknown(flag)
    place = argv.index(word) if word in argv else 0
    before = next((i for i in range(place - 1, -1, -1) if argv[i].startswith("--")), None)
    after = "" if before is None else f" after {' '.join(argv[before:place])}"
    return ConfigError(f"'{word}'{after}: a value that belongs to no flag; remove it or quote it with its value")


def _normalize(argv: Sequence[str]) -> tuple[list[Given], list[str]]:
    """Resolve underscores, take `--switch=false` apart, and protect negative numbers such as -1e-5 from argparse."""
    table, spellings = spelling_table(), canonical_spellings()
    given: list[Given] = []
    rest: list[str] = []
    for word in argv:
        if word in ("-h", "--help"):
            rest.append(word)
            continue
        if not word.startswith("--"):
            takes_one = bool(rest) and rest[-1] in table and not getattr(table[rest[-1]], "many", False)
            if takes_one and _is_negative_number(word):
                rest[-1] += "=" + word
            else:
                rest.append(word)
            continue
        name, equals, value = word.partition("=")
        spelling = spellings.get(name.replace("_", "-"))
        if spelling is None:
            raise refuse_unknown(name)
        if equals and _is_switch(table[spelling]):
            given.append(Given(spelling, _switch_value(spelling, value)))
        else:
            rest.append(spelling + equals + value)
    return given, rest


def _is_negative_number(word: str) -> bool:
    return re.fullmatch(r"-\d*\.?\d+([eE][-+]?\d+)?", word) is not None


def _is_switch(target: Target) -> bool:
    return target.is_switch if isinstance(target, Setting) else target.takes == "switch"


def _switch_value(spelling: str, text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ConfigError(f"{spelling}={text}: it is a switch; give {spelling} alone, or {spelling}=false")


class _Collect(argparse.Action):
    """Append what was given, in order, so that contradictions are seen and not overwritten."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.given.append(Given(str(option_string), True if self.nargs == 0 else values))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument ([^:/]+)[^:]*: expected (.*)", message)
        if match:
            flag, wanted = match.groups()
            count = int(number.group()) if (number := re.match(r"\d+", wanted)) else 1
            example = " ".join([flag, *["VALUE"] * count])
            raise ConfigError(f"{flag}: needs {wanted.replace('argument', 'value')}, as in {example}; see --help")
        raise ConfigError(message)


@cache
def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """An argparse parser that knows every spelling; its groups are the sections."""
    parser = _Parser(
        description=description or "Pretrain a GPT. Flags are spelled as in Megatron-LM; docs/flags.md lists them all.",
        allow_abbrev=False,
        epilog="A switch can be turned off again (after a preset or a file) with --switch=false.",
        usage="%(prog)s [flags]",
    )
    for section in SECTIONS:
        group = parser.add_argument_group(section)
        for setting in (s for s in all_settings() if s.section == section):
            group.add_argument(*setting.spellings, **_argparse_options(setting))
    for target in spelling_table().values():
        if isinstance(target, Retired | KnownFlag):
            nargs: int | str | None = {"switch": 0, "value": None, "values": "+"}[target.takes]
            parser.add_argument(target.spelling, action=_Collect, nargs=nargs, dest="given", help=argparse.SUPPRESS)
    return parser


def _argparse_options(setting: Setting) -> dict[str, Any]:
    flag = setting.flag
    text = flag.help
    if flag.status in ("later", "never"):
        text += " Not supported yet." if flag.status == "later" else " Not supported."
    elif setting.has_default:
        text += f" [{show(setting.default)}]"
    options: dict[str, Any] = {
        "action": _Collect,
        "dest": "given",
        "default": argparse.SUPPRESS,
        "help": text.replace("%", "%%"),
    }
    if setting.is_switch:
        return {**options, "nargs": 0}
    metavar = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else setting.base.__name__.upper()
    return {**options, "nargs": flag.nargs, "metavar": metavar}

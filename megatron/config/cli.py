"""The training command line: reads flags in Megatron's spelling, presets and YAML into one RunConfig."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

from megatron.config.checks import check
from megatron.config.compat import CompatFlag, RetiredFlag
from megatron.config.flag import Setting
from megatron.config.notices import notices_of
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


def parse_args(argv: Sequence[str] | None = None, *, needs_data: bool = True) -> RunConfig:
    """The checked settings of a training run; every mistake is a one-line ConfigError.

    `needs_data=False`: the script brings its own datasets, so neither data path nor tokenizer is required. `.notices`
    are lines to print once, `.origins` tells where each value came from.
    """
    config = resolve(list(sys.argv[1:] if argv is None else argv))
    check(config, needs_data=needs_data, complete=not config.checkpoint.use_checkpoint_args)
    return config


def resolve(argv: list[str]) -> RunConfig:
    """Merges the sources (default < preset < file < flag) without the checks across settings."""
    flags = Assignments(origin="flag")
    for given in tokenize(argv):
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


def tokenize(argv: Sequence[str]) -> list[Given]:
    """Splits argv into (spelling in the table, raw value); unknown flags are refused here."""
    given, rest = _normalize(argv)
    namespace, stray = make_parser().parse_known_args(rest, argparse.Namespace(given=given))
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
    """Resolves underscores, splits `--switch=false`, and attaches negative numbers such as -1e-5 to their flag, because
    argparse would take them for flags."""
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
    """Appends every occurrence in order: plain argparse would let a later value silently replace an earlier one."""

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
def make_parser() -> argparse.ArgumentParser:
    """An argparse parser of every spelling, with one group per section."""
    parser = _Parser(
        description="Pretrain a GPT. Flags are spelled as in Megatron-LM; docs/flags.md lists them all.",
        allow_abbrev=False,
        epilog="A switch can be turned off again (after a preset or a file) with --switch=false.",
        usage="%(prog)s [flags]",
    )
    for section in SECTIONS:
        group = parser.add_argument_group(section)
        for setting in (s for s in all_settings() if s.section == section):
            group.add_argument(*setting.spellings, **_argparse_options(setting))
    for target in spelling_table().values():
        if isinstance(target, RetiredFlag | CompatFlag):
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

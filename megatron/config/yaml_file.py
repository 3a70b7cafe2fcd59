"""Reads the YAML of --config, which may be untrusted: rejects deep nesting, aliases of collections, and object tags.

Dates stay text, as in `run-name: 2024-01-01`.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.config.presets import preset_meant
from megatron.config.text_file import text_of
from megatron.errors import ConfigError
from megatron.utils.numerals import real_number

_DEEPEST = 4  # levels of nesting; a list in a section is at level 3
_PLAIN_TAG = "tag:yaml.org,2002:str"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_DECIMAL = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[+-]?\.(inf|nan)", re.IGNORECASE)
_DATE_TAG = "tag:yaml.org,2002:timestamp"


_SHIPPED = tuple(Path(__file__).resolve().parents[above] / "configs" for above in (1, 2))  # installed, in a checkout


def shipped_configs() -> dict[str, Path]:
    """Returns name -> path of the YAML files that come with this package. --config accepts the names."""
    return {path.stem: path for folder in _SHIPPED for path in sorted(folder.glob("*.yaml"))}


def read_yaml(path: str) -> dict[Any, Any]:
    """Returns the file's mapping."""
    import yaml  # here, because a command line without --config needs no YAML

    text = text_of("--config", _found(path), "YAML")
    try:
        problem = _problem(yaml.parse(text, Loader=yaml.SafeLoader))
        if problem is not None:
            raise ConfigError(f"--config {path}: {problem}")
        nodes = yaml.compose(text, Loader=yaml.SafeLoader)
        problem = _other_notation(nodes)
        if problem is not None:
            raise ConfigError(f"--config {path}: {problem}")
        twice = _key_given_twice(nodes)
        content = _without_dates(yaml.SafeLoader)(text).get_single_data()
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a number of thousands of digits
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not valid YAML ({reason}); correct the file") from None
    if twice is not None:
        raise ConfigError(f"--config {path}: '{twice}' is set twice; keep one")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: not a mapping of settings; write lines such as 'num-layers: 12'")
    return content


def _found(path: str) -> str:
    """Returns the path of the file, or of the shipped file with this name."""
    names = {} if Path(path).exists() or Path(path).name != path or Path(path).suffix == ".yaml" else shipped_configs()
    if names and path not in names:
        raise ConfigError(
            f"--config {path}: no such file or shipped name{preset_meant(path, names)}; give a path or one of "
            f"{', '.join(names)}"
        )
    return str(names.get(path, path))


def _problem(events: Iterable[Any]) -> str | None:
    """Returns an error for the first construct that settings do not need. Reads the parser's events, builds nothing."""
    depth, collections = 0, set()
    for event in events:
        kind = type(event).__name__
        opens = kind in ("MappingStartEvent", "SequenceStartEvent")
        depth += opens - (kind in ("MappingEndEvent", "SequenceEndEvent"))
        line = f"line {event.start_mark.line + 1}"
        if depth > _DEEPEST:
            return f"{line}: nested too deeply; write settings as 'name: value', optionally in sections"
        if getattr(event, "tag", None) not in (None, "!", _PLAIN_TAG):
            return f"{line}: the tag {event.tag} is not supported; write only the value"
        if opens and event.anchor is not None:
            collections.add(event.anchor)
        if kind == "AliasEvent" and event.anchor in collections:
            return f"{line}: *{event.anchor} repeats a list or a section; write its values out"
    return None


def _other_notation(node: Any) -> str | None:
    """Returns an error for a number that YAML 1.1 reads unexpectedly: 010 is 8, 1:30 is 90 and 1_000 is 1000."""
    if node is None:
        return None
    if node.id != "scalar":
        inner = node.value if node.id == "sequence" else [item for pair in node.value for item in pair]
        return next(filter(None, map(_other_notation, inner)), None)
    if node.tag not in _NUMBER_TAGS or _NOT_FINITE.fullmatch(node.value):
        return None
    line = f"line {node.start_mark.line + 1}: {node.value}"
    if _DECIMAL.fullmatch(node.value) is None:
        return f"{line} is a number in YAML-specific notation; write it in decimal digits, or quote it if it is text"
    try:
        real_number(node.value)
    except ValueError as error:
        return f"{line}: {error}"
    return None


def _key_given_twice(node: Any) -> str | None:
    """Returns a key that occurs twice in one mapping. YAML would silently keep the last value."""
    seen: set[str] = set()
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        if key.id != "scalar":
            return "a list or a section as a key"
        if key.value in seen:
            return str(key.value)
        seen.add(key.value)
        inner = _key_given_twice(value)
        if inner is not None:
            return inner
    return None


def _without_dates(loader: Any) -> Any:
    kept = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE_TAG]
        for first, resolvers in loader.yaml_implicit_resolvers.items()
    }
    return type("Loader", (loader,), {"yaml_implicit_resolvers": kept})

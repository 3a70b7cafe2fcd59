"""Reads the YAML of --config, which may be another's file: nothing in it grows, nests or becomes an object.

Dates stay text: `run-name: 2024-01-01` means what is written there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.config.text_file import text_of
from megatron.errors import ConfigError

_DEEPEST = 4  # a list of numbers in a section is 3
_PLAIN_TAG = "tag:yaml.org,2002:str"
_DATE_TAG = "tag:yaml.org,2002:timestamp"


def read_yaml(path: str) -> dict[Any, Any]:
    """The mapping that the file holds."""
    import yaml  # here, because a command line without --config needs no YAML

    text = text_of("--config", path, "YAML")
    try:
        problem = _problem(yaml.parse(text, Loader=yaml.SafeLoader))
        if problem is not None:
            raise ConfigError(f"--config {path}: {problem}")
        twice = _key_given_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        content = _without_dates(yaml.SafeLoader)(text).get_single_data()
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of a number of thousands of digits, ValueError
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


def _problem(events: Iterable[Any]) -> str | None:
    """What a file of settings does not need: looked for in the parser's events, before anything is built from them."""
    depth, collections = 0, set()
    for event in events:
        kind = type(event).__name__
        opens = kind in ("MappingStartEvent", "SequenceStartEvent")
        depth += opens - (kind in ("MappingEndEvent", "SequenceEndEvent"))
        line = f"line {event.start_mark.line + 1}"
        if depth > _DEEPEST:
            return f"{line}: nested too deeply; settings are 'name: value', in sections or not"
        if getattr(event, "tag", None) not in (None, "!", _PLAIN_TAG):
            return f"{line}: the tag {event.tag} is not read; write the value alone"
        if opens and event.anchor is not None:
            collections.add(event.anchor)
        if kind == "AliasEvent" and event.anchor in collections:
            return f"{line}: *{event.anchor} repeats a list or a section; write its values out"
    return None


def _key_given_twice(node: Any) -> str | None:
    """A key that occurs twice in one mapping, of which YAML would silently keep the last value."""
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

"""DeepSpeed's JSON, a file or a dict, as values of our settings, with the lines to print about them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.compat.deepspeed_file.blocks import DECISIONS, without_booleans
from megatron.compat.deepspeed_file.json_file import read_json_without_duplicates
from megatron.compat.deepspeed_file.optimizers import decide_optimizer
from megatron.compat.deepspeed_file.reading import DeepSpeedSettings, FileReading
from megatron.config.refusals import Refusals

_LEFT_UNKNOWN: Mapping[Callable[[Any], None], tuple[str, ...]] = MappingProxyType({decide_optimizer: ("--lr",)})
"""The flags that are set, or required, by what a refused block may have said."""


def read_deepspeed(
    source: str | Path | Mapping[str, Any],
    *,
    name: str = "config",
    refusals: Refusals | None = None,
    stronger: Mapping[str, Any] = MappingProxyType({}),
) -> DeepSpeedSettings:
    """`source`: the path of a JSON file, or its content, which is called `name` in messages. All that is wrong with it
    is raised as one ConfigError, or goes to `refusals`, those of a command line. `stronger`: values that are used in
    place of the file's, by field."""
    found = Refusals() if refusals is None else refusals
    content: Mapping[str, Any] = {}
    if isinstance(source, Mapping):
        content = source
    else:
        name = str(source)
        with found.of_reading():
            content = read_json_without_duplicates(name)
    settings = DeepSpeedSettings(name)
    reading = FileReading(settings, found, stronger)
    reading.walk("", without_booleans(content))
    for decide in DECISIONS:
        with reading.naming(*_LEFT_UNKNOWN.get(decide, ())):
            decide(reading)
    if refusals is None:
        found.end()
    return settings

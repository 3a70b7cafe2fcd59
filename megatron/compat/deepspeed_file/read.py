"""Reads DeepSpeed's JSON, a file or a dict, into our settings and the notices to print."""

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
"""Flags that a rejected block may have set, so that their values count as unknown."""


def read_deepspeed(
    source: str | Path | Mapping[str, Any],
    *,
    name: str = "config",
    refusals: Refusals | None = None,
    stronger: Mapping[str, Any] = MappingProxyType({}),
) -> DeepSpeedSettings:
    """Reads `source`: the path of a JSON file, or its content, which messages call `name`. All errors are raised as one
    ConfigError, or collected in `refusals`. `stronger`: values, by field, that override the file's."""
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

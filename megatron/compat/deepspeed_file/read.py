"""DeepSpeed's JSON, a file or a dict, as values of our settings, with the lines to print about them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.compat.deepspeed_file.blocks import DECISIONS, without_booleans
from megatron.compat.deepspeed_file.json_file import read_json_without_duplicates
from megatron.compat.deepspeed_file.optimizers import decide_optimizer
from megatron.compat.deepspeed_file.reading import FileReading
from megatron.config.refusals import Refusals


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """What a DeepSpeed configuration says, in our settings. What it leaves out is in none of the mappings."""

    name: str
    """The file, or what else the configuration is called in messages."""
    values: Mapping[str, Any]
    """Field of a section of RunConfig -> its value."""
    keys: Mapping[str, str]
    """Field -> the key and the value that it came from, as in "fp16.hysteresis 2"."""
    notices: tuple[str, ...]
    """Lines to print, each of which begins with `name`."""
    content: Mapping[str, Any]
    """Key with dots -> its value, without null and "auto"."""

    @property
    def origins(self) -> Mapping[str, str]:
        """For RunConfig: with these the checks name the keys beside the flags."""
        return {name: f"key {key} of {self.name}" for name, key in self.keys.items()}


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
    reading = FileReading(name, found, stronger)
    reading.walk("", without_booleans(content))
    for decide in DECISIONS:
        with reading.naming(*_LEFT_UNKNOWN.get(decide, ())):
            decide(reading)
    if refusals is None:
        found.end()
    assignments = reading.assignments
    return DeepSpeedSettings(
        name=name,
        values=MappingProxyType(assignments.values),
        keys=MappingProxyType(assignments.spelled),
        notices=tuple(assignments.notices),
        content=MappingProxyType(reading.given),
    )

"""All checks across settings. Each raises a ConfigError with the settings, their values, the reason and the fix.

`check_settings` needs only the settings, `check_world` also the number of ranks, and `check_paths` the file system.
Errors of `check_settings` and `check_world` suggest only sizes that pass all checks of the same function.
`distributed/device.py` checks device and backend.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain

from megatron.config.checks import checkpoint, data, model, moe, parallel, training
from megatron.config.checks.paths import check_paths
from megatron.config.checks.world import find_in_world
from megatron.config.flag import Exclude, Need, Setting
from megatron.config.notices import spelled, without_effect
from megatron.config.refusals import Refusals
from megatron.config.run import RunConfig, all_settings, settings_by_name
from megatron.errors import ConfigError
from megatron.layout import PROCESSES


def check_settings(
    config: RunConfig, *, needs_data: bool = True, complete: bool = True, refusals: Refusals | None = None
) -> None:
    """Runs all checks that need only the settings.

    `complete=False`: the model's shape, the tokenizer and the sequence length are not known yet, because
    --use-checkpoint-args takes them from the checkpoint. Errors are collected in `refusals`; without it, they are
    raised.
    """
    found = Refusals() if refusals is None else refusals
    with found.with_sizes_that(_passes(config)):
        _find_in_settings(config, found, needs_data=needs_data, complete=complete)
    if refusals is None:
        found.end()


def check_world(config: RunConfig, world_size: int, refusals: Refusals | None = None) -> None:
    """Checks that the layout and the batch sizes fit the number of ranks. Errors are collected in `refusals`; without
    it they are raised."""
    found = Refusals() if refusals is None else refusals
    with found.with_sizes_that(_passes(config, world_size)):
        find_in_world(config, world_size, found)
    if refusals is None:
        found.end()


def _passes(config: RunConfig, world_size: int | None = None) -> Callable[[str, int], bool]:
    """Returns a function (flag or PROCESSES, size): True if the checks find no new error with this size."""

    @cache
    def lines(flag: str = "", size: int = 0) -> frozenset[str]:
        other, ranks, found = config, world_size, Refusals()
        if flag == PROCESSES:
            ranks = size
        elif flag:
            setting = settings_by_name()[flag.removeprefix("--").replace("-", "_")]
            section = replace(getattr(config, setting.section), **{setting.name: size})
            other = replace(config, origins={**config.origins, setting.name: "flag"}, **{setting.section: section})
        _find_in_settings(other, found, needs_data=False, complete=False)
        if ranks is not None:
            find_in_world(other, ranks, found)
        return frozenset(found.lines)

    return lambda flag, size: lines(flag, size) <= lines()


def _find_in_settings(config: RunConfig, found: Refusals, *, needs_data: bool, complete: bool) -> None:
    if complete:
        missing = [flag for flag in model.missing(config) if not found.doubts(flag)]
        if missing:
            found.refuse(model.required(missing))
    modules = (model, training, data, checkpoint, parallel, moe)
    checks = [check_one for module in modules for check_one in module.CHECKS]
    if needs_data:
        checks += [data.check_sources, *([data.check_tokenizer_flags] if complete else [])]
    with found.of_checking():
        for text in chain(_unmet(config), exclusions(config)):
            with found.of_checking():
                raise ConfigError(text)
    for check_one in checks:
        with found.of_checking():
            check_one(config)


def _unmet(config: RunConfig) -> Iterator[str]:
    """Yields an error for each setting that `insists` on a need and has no effect without it."""
    for setting, need in without_effect(config):
        if setting.flag.insists:
            named = spelled(config, setting.name)
            yield f"{named}: has no effect without {need.text}; add that, or remove this setting"


def exclusions(config: RunConfig, counts: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
    """Yields an error for each pair of settings that exclude each other. `counts`: False for settings to ignore."""
    for setting in all_settings():
        for exclude in setting.flag.excludes:
            if not counts(setting.name) or not (isinstance(exclude.other, Need) or counts(exclude.other)):
                continue
            own = _chosen(config, setting) if exclude.own is None else exclude.own(config)
            if own and (other := _excluded(config, exclude)) is not None:
                why = f": {exclude.why}" if exclude.why else ""
                yield f"{spelled(config, setting.name)} and {other} exclude each other{why}; {exclude.way_out}"


def _excluded(config: RunConfig, exclude: Exclude) -> str | None:
    """Returns the conflicting setting or condition as a text for messages; None if this run has no conflict."""
    if isinstance(exclude.other, Need):
        return exclude.other.text if exclude.other.met(config) else None
    chosen = config.given(exclude.other) if exclude.given else _chosen(config, settings_by_name()[exclude.other])
    return spelled(config, exclude.other) if chosen else None


def _chosen(config: RunConfig, setting: Setting) -> bool:
    value = config.value(setting)
    return value is not None and value != setting.default

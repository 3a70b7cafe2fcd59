"""P3.3: a run keeps every given value or rejects it; it never changes one silently."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import parse_args
from megatron.config import sources as sources_module
from megatron.config.flag import Setting
from megatron.config.megatron_lm_flags import compat_flags
from megatron.config.run import all_settings
from megatron.errors import ConfigError
from tests.unit.config.commands import SMALL, argv, without

VALUED = [s for s in all_settings() if not s.is_switch and s.name != "config"]
SWITCHES = [s for s in all_settings() if s.is_switch]


def value_of(setting: Setting) -> st.SearchStrategy[Any]:
    if setting.flag.choices:
        return st.sampled_from(setting.flag.choices)
    numbers = (
        st.integers(-2, 70) if setting.base is int else st.floats(-1, 3, allow_nan=False).map(lambda x: round(x, 4))
    )
    return numbers if setting.base in (int, float) else st.sampled_from(["a", "1", "90,10", "0.5", "x/y"])


@st.composite
def given_values(draw: st.DrawFn) -> tuple[Setting, list[Any]]:
    setting = draw(st.sampled_from(VALUED))
    count = setting.flag.nargs if isinstance(setting.flag.nargs, int) else draw(st.integers(1, 3))
    return setting, draw(st.lists(value_of(setting), min_size=count, max_size=count)) if setting.many else [
        draw(value_of(setting))
    ]


def check_kept(setting: Setting, values: list[Any]) -> None:
    command = argv(without(SMALL, setting.spelling))
    try:
        config = parse_args([*command, setting.spelling, *map(str, values)])
    except ConfigError as refusal:
        assert re.search(r"--[a-z]", str(refusal)), "the line names a setting: this one, or the one it needs"
        return
    assert config.value(setting) == (tuple(values) if setting.many else values[0])
    assert config.origins[setting.name] == "flag"


@given(given_values())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_every_value_is_kept_or_refused(drawn: tuple[Setting, list[Any]]) -> None:
    setting, values = drawn
    if setting.spelling != "--model":
        check_kept(setting, values)


@pytest.mark.parametrize("setting", SWITCHES, ids=lambda s: s.name)
def test_every_switch_is_kept_or_refused(setting: Setting) -> None:
    for typed, value in (
        (setting.spelling, not setting.flag.off),
        (f"{setting.spelling}=false", bool(setting.flag.off)),
    ):
        try:
            config = parse_args([*argv(without(SMALL, setting.spelling)), typed])
        except ConfigError as refusal:
            assert setting.spelling in str(refusal) or "--data-path" in str(refusal)
            continue
        assert config.value(setting) is value


@pytest.mark.parametrize("flag", compat_flags().values(), ids=lambda flag: flag.spelling)
def test_every_known_flag_prints_its_line_or_is_refused(flag: Any) -> None:
    values = {"switch": [], "value": [flag.accepts[0] if flag.accepts else "7"], "values": ["7", "8"]}[flag.takes]
    command = [*argv(SMALL), flag.spelling, *values]
    if flag.status == "no-op":
        assert any(line.startswith(flag.spelling) and flag.note in line for line in parse_args(command).notices)
        return
    with pytest.raises(ConfigError, match=f"^{flag.spelling}.*: not supported") as caught:
        parse_args(command)
    assert flag.note.replace("VALUE", " ".join(values)) in str(caught.value)
    if flag.neutral is not None:
        assert parse_args([*argv(SMALL), flag.spelling, flag.neutral]).notices == ()


def test_the_property_sees_a_changed_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: clamps a value, as Megatron clamps the tensor-parallel size to the world."""
    honest = sources_module.parse_value
    monkeypatch.setattr(
        sources_module,
        "parse_value",
        lambda s, raw: min(honest(s, raw), 4) if s.name == "num_workers" else honest(s, raw),
    )
    setting = next(s for s in VALUED if s.name == "num_workers")
    check_kept(setting, [3])
    with pytest.raises(AssertionError):
        check_kept(setting, [8])

"""Pages of flags and golden lists match the declarations: no flag appears, disappears or changes status unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import docs
from megatron.config.megatron_lm_flags import compat_flags, refused_family
from megatron.config.presets import PRESETS
from megatron.config.run import all_settings, settings_by_name
from megatron.config.sources import canonical_spellings, spelling_table
from megatron.config.values import show

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"


@pytest.mark.parametrize("argument", docs.PAGES)
def test_a_file_is_what_the_declarations_generate(argument: str) -> None:
    """The list of names shows new flags."""
    path, generate = docs.PAGES[argument]
    assert (ROOT / path).read_text() == generate(), f"run: python -m megatron.config.docs {argument} > {path}"


def test_every_spelling_is_documented() -> None:
    pages = docs.flags_page() + docs.others_page()
    assert [spelling for spelling in spelling_table() if f"`{spelling}`" not in pages] == []


def test_every_preset_is_documented_with_all_its_values() -> None:
    """A setting of a preset is in its row, or in the list of the section."""
    sections = docs.presets_page().split("\n## ")[1:]
    for name, values in PRESETS.items():
        (section,) = (one for one in sections if f"| `{name}` |" in one)
        (row,) = (line for line in section.splitlines() if line.startswith(f"| `{name}` |"))
        common = section.partition("\n| preset")[0]
        cells = [cell.strip() for cell in row.split("|")]
        for key, value in values.items():
            given = f"`{key}` {show(value)}"
            shaped = f"{value:.0f}" if isinstance(value, float) else show(value)
            assert given in row or given in common or shaped in cells, (name, key)


@pytest.mark.parametrize(("trainer", "count"), [("megatron", 230), ("megatron_deepspeed", 90)])
def test_every_flag_of_megatron_is_known_by_name(trainer: str, count: int) -> None:
    known = canonical_spellings()
    names = (GOLDEN / f"flags_{trainer}.txt").read_text().split()
    assert len(names) > count
    assert [name for name in names if name.replace("_", "-") not in known and not refused_family(name)] == []


def test_spellings_do_not_collide() -> None:
    spellings = [spelling for setting in all_settings() for spelling in setting.spellings]
    assert len(set(spellings)) == len(spellings)
    assert len(canonical_spellings()) == len(spelling_table())
    assert len(settings_by_name()) == len(all_settings())


def test_declarations_are_complete() -> None:
    for setting in all_settings():
        flag = setting.flag
        assert flag.help.endswith((".", ")")), setting.name
        assert bool(flag.note) == (flag.status != "works"), setting.name
        assert not flag.off or (setting.default is True), setting.name
        assert setting.default is not True or flag.off, (
            f"{setting.name}: a default-on switch needs a way to turn it off"
        )
        assert setting.default in (None, 0, "") or not flag.choices or setting.many or setting.default in flag.choices
    assert all(flag.note for flag in compat_flags().values())

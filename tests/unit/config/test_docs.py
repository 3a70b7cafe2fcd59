"""docs/flags.md and golden lists match the declarations: no flag appears, disappears or changes status unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import docs
from megatron.config.megatron_lm_flags import compat_flags, refused_family
from megatron.config.run import all_settings, settings_by_name
from megatron.config.sources import canonical_spellings, spelling_table

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"


def test_the_page_is_what_the_declarations_generate() -> None:
    written = (ROOT / "docs" / "flags.md").read_text()
    assert written == docs.flags_page(), "run: python -m megatron.config.docs > docs/flags.md"


def test_new_flags_show_in_the_golden_list() -> None:
    written = (GOLDEN / "flags.txt").read_text()
    assert written == docs.names(), "run: python -m megatron.config.docs --names > tests/golden/flags.txt"


def test_every_spelling_is_documented() -> None:
    page = docs.flags_page()
    assert [spelling for spelling in spelling_table() if f"`{spelling}`" not in page] == []


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

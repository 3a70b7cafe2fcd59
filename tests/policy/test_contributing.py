"""CONTRIBUTING.md shows the packages that there are, each at the level that the rules give it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from tests.policy import rules

CONTRIBUTING = (rules.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

Levels = Mapping[str, int]


def in_table(text: str) -> dict[str, int]:
    rows = re.findall(r"^\| (-?\d+) \| `megatron/(\w+)(?:/|\.py)` \|", text, re.M)
    return {package: int(level) for level, package in rows}


def in_picture(text: str) -> dict[str, int]:
    lines = re.findall(r"^level +(-?\d+)((?: +\w+)+)", text, re.M)
    return {package: int(level) for level, packages in lines for package in packages.split()}


@pytest.mark.parametrize("shown", [in_table, in_picture])
def test_every_package_is_shown_at_its_level(shown: Callable[[str], Levels]) -> None:
    assert shown(CONTRIBUTING) == rules.LEVELS


def test_the_levels_are_those_of_the_packages_that_exist() -> None:
    entries = list((rules.ROOT / "megatron").iterdir())
    packages = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert packages == rules.LEVELS.keys()


@pytest.mark.parametrize(
    ("package", "row"),
    [("ops", "| 1 | `megatron/ops/`"), ("layout", "| 0 | `megatron/layout.py`"), ("model", "level 2   model ")],
)
def test_a_package_that_is_left_out_is_missed(package: str, row: str) -> None:
    changed = CONTRIBUTING.replace(row, "| somewhere")
    assert changed != CONTRIBUTING
    assert package not in in_table(changed) or package not in in_picture(changed)

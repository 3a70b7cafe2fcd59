"""CONTRIBUTING.md lists the existing packages, each at the level that the rules give it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

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


def paths_and_names(text: str) -> Iterator[tuple[str, str]]:
    """(path, name that the file should define, or "") of each code reference on the page."""
    for name, path in re.findall(
        r"(?:`(\w+)`\s+(?:there\s+)?\()?`((?:megatron|tests|docs|csrc|tools)/[\w/.]+|\w+\.py)`", text
    ):
        yield path, name


def test_the_files_and_names_that_entries_tell_are_there() -> None:
    told = list(paths_and_names(CONTRIBUTING))
    assert len(told) > 60 and ("megatron/tokenizer_types.py", "TOKENIZERS") in told
    for path, name in told:
        file = rules.ROOT / path
        if "/" not in path:
            assert file.exists() or any(rules.ROOT.glob(f"megatron/**/{path}")), path
            continue
        assert file.exists(), path
        assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) if name else True, (path, name)

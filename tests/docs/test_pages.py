"""Every page begins with one sentence about its subject ("This page ...") and with a table of contents."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import PAGES, ROOT

LINK = re.compile(r"\[([^\]]+)\]\(#([^)]+)\)")


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def missing(text: str) -> list[str]:
    """Parts that the head of a page lacks."""
    head = text.split("\n## ")[0]
    listed = [target for _, target in LINK.findall(head)]
    expected = [anchor(title) for title in sections(text)]
    found = [] if listed == expected else [f"the contents {listed} are not the sections {expected}"]
    return found if re.search(r"^This page \w+", head, re.M) else [*found, "a first sentence about its subject"]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_a_page_begins_with_its_purpose_and_its_contents(page: str) -> None:
    assert missing((ROOT / page).read_text(encoding="utf-8")) == []


def test_the_readme_lists_its_sections() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {anchor(title) for title in sections(text)} == {target for _, target in LINK.findall(text.split("\n## ")[0])}


def test_the_index_of_design_notes_lists_each_by_its_title() -> None:
    design = ROOT / "docs" / "design"
    titles = {note.name: note.read_text(encoding="utf-8").splitlines()[0] for note in design.glob("0*.md")}
    index = (design / "README.md").read_text(encoding="utf-8")
    listed = {name: f"# {title}" for title, name in re.findall(r"^- \d{3} \[(.+)\]\((.+)\)(?:, [\d-]+)?$", index, re.M)}
    assert listed == titles


def test_a_page_without_them_is_seen() -> None:
    good = "# T\n\nThis page describes a.\n\n[One two](#one-two)\n\n## One two\n"
    assert missing(good) == []
    assert missing(good + "\n## Three\n")
    assert missing(good.replace("This page describes", "After this page you know"))

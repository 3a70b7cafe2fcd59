"""The documentation site's structure; `python tools/build_docs.py --check` builds it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT
from tools import build_docs, screenshot_docs

INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
HEADINGS = ("Tutorials", "How-to", "Reference", "Explanation")


def listed(heading: str) -> list[str]:
    section = INDEX.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", section, re.M)


def test_every_page_is_in_the_sidebar_once() -> None:
    pages = [page for heading in HEADINGS for page in listed(heading)]
    assert len(set(pages)) == len(pages)
    own = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if "/" not in page} == own, "list the page in docs/index.md"
    assert all((ROOT / "docs" / page).is_file() for page in pages)


def test_three_doors() -> None:
    doors = re.findall(r"^- \[\*\*[^\]]+\*\*\]\((.+)\)$", INDEX.split("## Tutorials")[0], re.M)
    assert len(doors) == 3 and all((ROOT / "docs" / door).is_file() for door in doors)


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    spec = importlib.util.spec_from_file_location("markdown_pages", ROOT / "docs" / "site" / "markdown_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sidebar_is_the_start_pages_lists(extension: ModuleType) -> None:
    groups = extension.sidebar(INDEX)
    assert groups == {heading: [page.removesuffix(".md") for page in listed(heading)] for heading in HEADINGS}


def test_names_of_rows(extension: ModuleType) -> None:
    rows = extension.row_names
    assert rows(["flag", "also", "default"], ["--a-b", "--c, -d", "--e"]) == ["--a-b", "--c", "-d"]
    assert rows(["flag", "meaning now"], ["--a", "as --b"]) == ["--a"]
    assert rows(["code", "meaning"], ["14", "NaN"]) == ["exit code 14"]
    assert rows(["axis", "flags"], ["data", "--a"]) == []


def test_broken_links_and_missing_entries_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b.html#here"></a><a href="#top"></a><img src="c.svg">')
    (tmp_path / "b.html").write_text(
        '<p id="there"></p><a href="https://example.org/x"></a><a href="a.html?q=1#top"></a>'
    )
    assert build_docs.broken_links(tmp_path) == ["a.html: b.html#here", "a.html: c.svg"]
    (tmp_path / "searchindex.js").write_text('Search.setIndex({"indexentries": {"--a": [[0, "flag-a", true]]}})')
    assert build_docs.not_found(build_docs.read_search_index(tmp_path), ["--a", "--b"]) == ["--b"]


def test_every_flag_and_exit_code_is_wanted() -> None:
    wanted = list(build_docs.wanted_entries())
    assert {"--seq-length", "--num-key-value-heads", "exit code 2", "exit code 18"} <= set(wanted)
    assert len(wanted) > 600


def test_what_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(ROOT / "tools" / "screenshot_docs.py"), "--chromium", str(tmp_path / "no")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and re.fullmatch(r"error: --chromium: .*/no is not a program; .*\n", done.stderr)
    monkeypatch.setattr(screenshot_docs.shutil, "which", lambda name: None)
    with pytest.raises(screenshot_docs.BrowserError, match=r"none of chromium, .* is on the PATH; install Chromium"):
        screenshot_docs.find_chromium(None)
    monkeypatch.setattr(build_docs, "find_spec", lambda name: None)
    with pytest.raises(
        build_docs.SiteError, match=r"sphinx, furo, .* not installed for .*; pip install -e '\.\[docs\]'"
    ):
        build_docs.build(tmp_path)

"""Builds the documentation site without a network; warnings are errors.

It needs the extra `docs`: pip install -e '.[docs]' -c constraints.txt. The site is written to build/site.
With --check the command also checks links, anchors and the search index.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

PACKAGES = {"sphinx": "sphinx", "furo": "furo", "myst_parser": "myst-parser", "sphinx_copybutton": "sphinx-copybutton"}


class SiteError(Exception):
    """Reasons why the site cannot be built or fails a check, one per line."""


@dataclass
class Page(HTMLParser):
    """The anchors of one page and the addresses that it links to."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def build(output: Path) -> None:
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise SiteError(
            f"{', '.join(missing)} not installed for {sys.executable}; pip install -e '.[docs]' -c constraints.txt"
        )
    shutil.rmtree(output, ignore_errors=True)
    sphinx = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-b", "html", "-c", "docs/site"]
    done = subprocess.run([*sphinx, ".", str(output)], cwd=ROOT, check=False)
    if done.returncode:
        raise SiteError(f"Sphinx ended with {done.returncode}; each warning above names its page and line")


def broken_links(site: Path) -> list[str]:
    """Returns the links to files or anchors of the site that do not exist."""
    pages = {path.resolve(): Page() for path in site.rglob("*.html")}
    for path, page in pages.items():
        page.feed(path.read_text(encoding="utf-8"))
    return [
        f"{path.relative_to(site.resolve())}: {link}"
        for path, page in pages.items()
        for link in page.links
        if not _leads_somewhere(link, path, pages)
    ]


def _leads_somewhere(link: str, start: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True  # links to other sites are not checked
    target = (start.parent / unquote(parts.path)).resolve() if parts.path else start
    if target not in pages:
        return target.is_file()
    return not parts.fragment or unquote(parts.fragment) in pages[target].anchors


def read_search_index(site: Path) -> dict[str, Any]:
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    return index


def not_found(index: dict[str, Any], wanted: Iterable[str]) -> list[str]:
    """Lists the texts that have no entry with an anchor in the site's search index."""
    entries = index["indexentries"]
    return [text for text in wanted if not any(anchor for _, anchor, _ in entries.get(text.lower(), ()))]


def wanted_entries() -> Iterator[str]:
    """Yields every flag in every spelling, and every exit code."""
    from megatron.config.docs import names_with_status

    yield from (line.split()[0] for line in names_with_status().splitlines())
    yield from (f"exit code {code}" for code in exit_codes())


def exit_codes() -> list[int]:
    """Returns 0 and the exit codes of the package's errors."""
    from megatron import errors

    of_errors = {value.exit_code for value in vars(errors).values() if hasattr(value, "exit_code")}
    return sorted({0, *of_errors})


def check(site: Path) -> None:
    lines = [f"broken link: {place}" for place in broken_links(site)]
    lines += [f"the search does not find: {text}" for text in not_found(read_search_index(site), wanted_entries())]
    if lines:
        raise SiteError("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site", metavar="DIR", help="the site's folder")
    parser.add_argument("--check", action="store_true", help="also check links, anchors and the search index")
    arguments = parser.parse_args()
    try:
        build(arguments.output)
        if arguments.check:
            check(arguments.output)
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output / 'index.html'}: built{', links and search checked' if arguments.check else ''}")
    return 0


if __name__ == "__main__":
    from megatron.utils.command_line import run_tool

    sys.exit(run_tool("build_docs.py", main))

"""A Sphinx extension for pages that are plain Markdown: the sidebar, the search index and figures follow from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

GROUPS = ("Tutorials", "How-to", "Reference", "Explanation")
_REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">{url}</a>\n'
)


def sidebar(index: str) -> dict[str, list[str]]:
    """The pages that docs/index.md lists under the heading of each group, as links relative to docs/."""
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", index, re.M | re.S))
    return {group: re.findall(r"^- \[[^\]]+\]\(([^)]+)\.md\)", sections[group], re.M) for group in GROUPS}


def add_sidebar(app: Sphinx, docname: str, source: list[str]) -> None:
    """Appends a hidden table of contents per group to the start page, and one of all notes to the design notes."""
    if docname == "docs/index":
        source[0] += "".join(_contents(group, pages) for group, pages in sidebar(source[0]).items())
    elif docname == "docs/design/README":
        notes = sorted(re.findall(r"\((\d{3}-[^)]+)\.md\)", source[0]))
        source[0] += _contents("Design notes", notes)


def _contents(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


class TableRows(SphinxTransform):
    """Gives each row of a table of flags or exit codes an anchor, and puts its names into the search index.

    The search splits text into words, so `--seq-length` alone would find every page with "seq" and "length".
    """

    default_priority = 700

    def apply(self, **kwargs: Any) -> None:
        for table in self.document.findall(nodes.table):
            columns = [entry.astext().lower() for entry in next(table.findall(nodes.thead)).findall(nodes.entry)]
            for row in next(table.findall(nodes.tbody)).findall(nodes.row):
                names = row_names(columns, [entry.astext() for entry in row.findall(nodes.entry)])
                if names:
                    self._label(row, names)

    def _label(self, row: nodes.row, names: list[str]) -> None:
        paragraph = next(row.findall(nodes.paragraph))
        anchor = nodes.make_id(f"flag{names[0]}" if names[0].startswith("-") else names[0])
        while anchor in self.document.ids:
            anchor += "-again"
        target = nodes.target("", "", ids=[anchor])
        self.document.note_explicit_target(target)
        entries = [("single", name, target["ids"][0], "main", None) for name in names]
        paragraph.insert(0, [addnodes.index(entries=entries), target])


def row_names(columns: list[str], cells: list[str]) -> list[str]:
    """Lists the texts that find this row in a search: a flag with its other spellings, or "exit code 14"."""
    if columns[0] in ("code", "exit code") and cells[0].isdigit():
        return [f"exit code {cells[0]}"]
    if columns[0] not in ("flag", "prefix"):
        return []
    spelled = cells[0] if columns[1:2] != ["also"] else f"{cells[0]} {cells[1]}"
    return re.findall(r"--?[A-Za-z][\w-]*", spelled)


class Figures(SphinxTransform):
    """Makes a picture and the emphasised text in the same paragraph a figure with a caption."""

    default_priority = 701

    def apply(self, **kwargs: Any) -> None:
        for paragraph in list(self.document.findall(nodes.paragraph)):
            parts = [part for part in paragraph.children if part.astext().strip() or isinstance(part, nodes.image)]
            if [type(part) for part in parts] == [nodes.image, nodes.emphasis]:
                figure = nodes.figure("", parts[0], nodes.caption("", "", *parts[1].children))
                figure["ids"] = [nodes.make_id(f"picture-{Path(parts[0]['uri']).stem}")]
                paragraph.replace_self(figure)


def redirect_to_start(app: Sphinx, error: Exception | None) -> None:
    """The site's root leads to the start page."""
    if error is None:
        Path(app.outdir, "index.html").write_text(_REDIRECT.format(url="docs/index.html"), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", add_sidebar)
    app.connect("build-finished", redirect_to_start)
    app.add_transform(TableRows)
    app.add_transform(Figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

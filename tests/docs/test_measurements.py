"""No measurement is lost: what docs/performance.md had recorded at commit 85e9282a is still in it or in RESULTS.md.

`tests/golden/measurements.txt` has that page's numbers. A line with a tab is a row of a table: its label and numbers.
The other lines are the numbers of a paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.docs.blocks import ROOT

PAGES = ("docs/performance.md", "benchmarks/RESULTS.md")
RECORDED = ROOT / "tests" / "golden" / "measurements.txt"


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the label and the numbers of each table row; a row without a label has the one above."""
    label = ""
    for line in text.splitlines():
        first, *rest = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] or [""]
        if line.startswith("|") and not line.startswith("|---"):
            label = first or label
            yield label, numbers(" ".join(rest))


def lost(recorded: str, pages: str) -> list[str]:
    """Lines of the record whose row, or whose numbers, the pages lack."""
    tables = {f"{label}\t{' '.join(found)}" for label, found in rows(pages)}
    present = set(numbers(pages))
    return [
        line for line in recorded.splitlines() if line not in tables and ("\t" in line or set(line.split()) - present)
    ]


def test_every_measurement_is_still_recorded() -> None:
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    recorded = RECORDED.read_text(encoding="utf-8")
    assert recorded.count("\n") > 200
    assert lost(recorded, pages) == []


def test_a_lost_number_is_seen() -> None:
    page = "Of 7 runs none took 1,200 s.\n\n| | a | b |\n|---|---|---|\n| fast | 1.5 | 2 to 3 |\n| | 4 | |\n"
    recorded = "7 1,200\nfast\t1.5 2 3\nfast\t4\n"
    assert lost(recorded, page) == []
    assert lost(recorded, page.replace("1,200", "1,300")) == ["7 1,200"]
    assert lost(recorded, page.replace("2 to 3", "2")) == ["fast\t1.5 2 3"]
    assert lost(recorded, page.replace("fast", "slow")) == ["fast\t1.5 2 3", "fast\t4"]

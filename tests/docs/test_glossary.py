"""The glossary has at most sixty terms in one alphabet, and the pages link to it where they first use a term."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from megatron.config.sources import spelling_table
from tests.docs.blocks import ROOT
from tests.docs.test_pages import anchor

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^### (.+)\n\n(.+)\n\n- Elsewhere: (.+)\.\n- Flag: (.+)\.$", re.M)
TERMS = [found[1] for found in ENTRY.finditer(GLOSSARY)]
OF_OTHER_PROGRAMS = {"--nproc_per_node", "--nnodes", "--append-eod"}  # of torchrun and tools/preprocess_data.py
LINKED = (
    "docs/installation.md",
    "docs/getting_started.md",
    "docs/data.md",
    "docs/performance.md",
    "docs/from_transformers.md",
    "docs/huggingface.md",
    "docs/sft.md",
    "docs/model_families.md",
    "docs/checkpoints.md",
    "docs/megatron_checkpoints.md",
    "docs/generation.md",
    "docs/evaluation.md",
    "docs/from_megatron_lm.md",
    "docs/api.md",
    "docs/proofs.md",
    "docs/numerics.md",
    "docs/first_run.md",
    "docs/training.md",
    "docs/parallelism.md",
    "docs/troubleshooting.md",
    "docs/scale.md",
    "docs/kernels.md",
    "docs/launchers.md",
    "docs/any_model.md",
)
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")


def test_at_most_sixty_terms_in_one_alphabet() -> None:
    assert re.findall(r"^### (.+)$", GLOSSARY, re.M) == TERMS, "an entry has another form"
    assert 30 < len(TERMS) <= 60
    assert sorted(TERMS, key=lambda term: re.sub(r"\W", " ", term.lower())) == TERMS
    assert len({anchor(term) for term in TERMS}) == len(TERMS)


@pytest.mark.parametrize("entry", [pytest.param(found, id=found[1]) for found in ENTRY.finditer(GLOSSARY)])
def test_an_entry_is_a_sentence_with_names_and_a_flag_that_exists(entry: re.Match[str]) -> None:
    _, meaning, elsewhere, flag = entry.groups()
    assert meaning.endswith(".") and not re.search(r"[.!?;]\s", meaning), "one sentence"
    assert re.search(r"Megatron|DeepSpeed|FSDP", elsewhere)
    flags = set(re.findall(r"`(--[\w-]+)`", flag))
    assert flags and flags <= spelling_table().keys() | OF_OTHER_PROGRAMS


def blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def prose(text: str) -> str:
    """Returns the page with spaces in place of code, headings and the box, so positions stay."""
    return re.sub(r"```.*?```|`[^`\n]*`|^#+ [^\n]*|^>[^\n]*", blank, text, flags=re.M | re.S)


def words(term: str) -> str:
    """Returns a pattern for the term, which may be broken over two lines."""
    return r"\s+".join(map(re.escape, term.split()))


def first_use(term: str, text: str) -> tuple[int, int] | None:
    """Returns the place of the first use of a term, also in the plural. Links to other places do not count."""
    others = re.sub(LINK, lambda link: link[0] if "glossary.md#" in link[2] else blank(link), prose(text))
    longer = [other for other in TERMS if term.lower() in other.lower() and other != term]
    for other in longer:
        others = re.sub(rf"\b{words(other)}", blank, others, flags=re.IGNORECASE)
    found = re.search(rf"(?<![\w#-]){words(term)}(?:e?s)?(?![\w-])", others, re.IGNORECASE)
    return found and found.span()


def unlinked(text: str) -> Iterator[str]:
    for term in TERMS:
        place = first_use(term, text)
        if place is not None:
            link = f"[{text[slice(*place)]}](glossary.md#{anchor(term)})"
            if text[place[0] - 1 :][: len(link)] != link:
                yield term


@pytest.mark.parametrize("page", LINKED)
def test_the_first_use_of_a_term_links_to_it(page: str) -> None:
    assert list(unlinked((ROOT / page).read_text(encoding="utf-8"))) == []


def test_a_first_use_without_a_link_is_seen() -> None:
    assert list(unlinked("# Ranks\n\nA `rank`. Ranks wait.")) == ["Rank"]
    assert list(unlinked("All [ranks](glossary.md#rank) wait for a rank.")) == []
    assert list(unlinked("A rank, then [ranks](glossary.md#rank).")) == ["Rank"]
    assert list(unlinked("Uses [Expert parallelism](glossary.md#expert-parallelism).")) == []

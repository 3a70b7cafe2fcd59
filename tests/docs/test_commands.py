"""Runs the command blocks of each page as typed, in order, in a copy of the checkout that no other page has used.

The small run that pages begin with is made once; every page gets a copy of it.

Most commands fork an interpreter that has imported torch. A few start real ones: those of the README that generate
text (test_quickstart.py runs the others' like), and the benchmark of a start.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, all_blocks, blocks_of
from tests.helpers.checkout import Checkout, copy_checkout

BLOCKS = all_blocks()
SHOWN_ONLY = 12  # console blocks: what needs minutes, a cluster or a network; few, and no more of them


COMMANDS = [block for block in BLOCKS if block.language == "bash"]
SMALL_RUN = "bash examples/small_run.sh"
STARTS_ITSELF = {"README.md": ("tools/generate.py",), "docs/scale.md": ("benchmarks/start_many.py",)}
MAKES_ITS_OWN = {"README.md", "docs/first_run.md"}  # their subject is how these files are made


class Copies:
    """The checkout of each page: with the small run if its first block makes that, else without."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[str, Checkout] = {}

    def of(self, page: str) -> Checkout:
        if page not in self._pages:
            first = next(block for block in COMMANDS if block.page == page)
            made = self._with_small_run() if SMALL_RUN in first.text else self._plain()
            target = self._folder / page.replace("/", "-")
            shutil.copytree(made, target)
            self._pages[page] = Checkout(target)
        return self._pages[page]

    def _plain(self) -> Path:
        plain = self._folder / "plain"
        return plain if plain.exists() else copy_checkout(plain).root

    def _with_small_run(self) -> Path:
        made = self._folder / "small-run"
        if not made.exists():
            shutil.copytree(self._plain(), made)
            Checkout(made, warm=True).must_run(SMALL_RUN)
        return made


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    return Copies(tmp_path_factory.mktemp("docs"))


@pytest.fixture(scope="module")
def checkout(copies: Copies) -> Checkout:
    return Checkout(copies._plain())


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in COMMANDS])
def test_the_block_runs(block: Block, copies: Copies) -> None:
    warm = not any(program in block.text for program in STARTS_ITSELF.get(block.page, ()))
    Checkout(copies.of(block.page).root, warm).must_run(block.text)


def test_a_page_that_uses_the_small_run_begins_with_it() -> None:
    """The box "You need" is the first block; what else a page needs stands there too."""
    made = re.compile(r"\b(small\.yaml|runs/small|my-model|corpus_content_document|vocab\.json)\b")
    for page in {block.page for block in COMMANDS} - MAKES_ITS_OWN:
        blocks = [block.text for block in COMMANDS if block.page == page]
        assert SMALL_RUN in blocks[0] or not any(made.search(text) for text in blocks), page


@pytest.mark.parametrize("broken", ["false\ntrue", "false | true", "echo $never_set", "python tools/generate.py"])
def test_a_block_that_fails_is_seen(broken: str, checkout: Checkout) -> None:
    with pytest.raises(AssertionError, match="exit code"):
        checkout.must_run(broken)


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.name) for block in BLOCKS if block.language == "python"]
)
def test_python_blocks_parse(block: Block) -> None:
    ast.parse(block.text)


def test_most_command_blocks_are_executed() -> None:
    languages = [block.language for block in BLOCKS]
    assert set(languages) <= {"bash", "console", "python", "yaml", "json", "text"}, "every block names its language"
    assert languages.count("bash") >= 10
    assert languages.count("console") <= SHOWN_ONLY


def test_the_packages_for_a_container_are_all_requirements_but_its_own() -> None:
    required = re.findall(r"^[a-z]+", (ROOT / "requirements.txt").read_text(encoding="utf-8"), flags=re.M)
    (named,) = re.findall(r"^pip install (tokenizers .*)$", (ROOT / "docs/installation.md").read_text(), flags=re.M)
    assert sorted(named.split()) == sorted(set(required) - {"torch", "numpy"})


def test_every_page_is_read() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")} <= set(PAGES)


def test_files_named_in_the_docs_exist() -> None:
    """Covers code and links: `megatron/...`, `tests/...`, `tools/...` and `docs/...` that a page names must exist."""
    missing = []
    for page in [*PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "design").glob("*.md"))]:
        text = (ROOT / page).read_text(encoding="utf-8")
        named = re.findall(r"`((?:megatron|tests|tools|docs|examples|csrc|benchmarks)/[\w./-]*\w/?)`", text)
        linked = [link for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text) if link]
        base = (ROOT / page).parent
        missing += [f"{page}: {name}" for name in named if not (ROOT / name).exists()]
        missing += [f"{page}: {link}" for link in linked if not (base / link).exists()]
    assert not missing, "\n".join(missing)


# Flags of the launchers, of pip and of the interpreters that the pages call.
FOREIGN = {"--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port", "--ntasks-per-node"}
FOREIGN |= {"--inplace", "--system-site-packages", "--standalone", "--array", "--wrap", "--rdzv_endpoint"}
FOREIGN |= {"--nodes", "--time", "--signal", "--open-mode", "--tag", "--local-dir", "--extra-index-url"}
FOREIGN |= {"--torch-backend", "--shm-size"}
FOREIGN |= {"--find-links", "--no-index", "--no-build-isolation"}
TYPED_WRONG = {"--num-layer", "--per_device_train_batch_size"}  # examples of flags that do not exist
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")


def known_flags() -> set[str]:
    """Flags of training, and those in the sources of tools, benchmarks and example scripts."""
    sources = [*(ROOT / "docs").glob("flags*.md"), *(ROOT / "tools").glob("*.py"), *(ROOT / "examples").glob("*.*")]
    sources += [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "csrc").glob("*.py")]
    sources += [ROOT / "megatron" / "config" / "docs.py", ROOT / "megatron" / "utils" / "help.py"]
    sources += [ROOT / "tests" / "run.sh", ROOT / "tests" / "policy" / "prose.py"]
    for package in ("cli", "preprocess", "inference", "evaluation", "training"):
        sources += (ROOT / "megatron" / package).rglob("*.py")
    return {flag for path in sources for flag in FLAG.findall(path.read_text(encoding="utf-8"))}


def test_what_the_readme_says_was_measured_stands_in_the_measurements() -> None:
    """Each number is in one table row of docs/performance.md, which has its machine, date and command."""
    tables = re.search(r"^## Measured\n(.*?)^## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert tables is not None
    cells = [cell for line in tables[1].splitlines() if line.startswith("|") for cell in line.split("|")[2:]]
    said = {number for cell in cells for number in re.findall(r"\b\d+(?:\.\d+)?x?(?=\s|$)", cell)}
    measured = "\n".join(
        line for line in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"
    )
    assert len(said) > 12
    assert [
        number for number in sorted(said) if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.x])", measured)
    ] == []


def test_design_notes_have_a_number_of_their_own() -> None:
    notes = (path.name for path in (ROOT / "docs" / "design").glob("*.md"))
    numbers = [name[:3] for name in notes if name != "README.md"]
    assert len(set(numbers)) == len(numbers) and all(number.isdigit() for number in numbers)


def test_flags_named_in_the_docs_are_known() -> None:
    known = known_flags() | FOREIGN | TYPED_WRONG
    pages = {page: FLAG.findall((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    unknown = sorted(f"{page}: {flag}" for page, flags in pages.items() for flag in set(flags) - known)
    assert not unknown, "\n".join(unknown)


def test_the_reader_of_blocks() -> None:
    text = "a\n```bash\ntrue\n```\n    ```console\n    x\n    ```\n"
    assert [(block.line, block.language) for block in blocks_of(text, "p")] == [(2, "bash"), (5, "console")]
    with pytest.raises(ValueError, match="never ends"):
        blocks_of("```bash\ntrue\n", "p")

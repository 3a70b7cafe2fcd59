"""Finds prose that a stranger has to read twice, in every place where the project speaks.

    python -m tests.policy.prose                     counts by measure and kind of text, beside the accepted counts
    python -m tests.policy.prose --list megatron/ops docs/data.md     every place in these files
    python -m tests.policy.prose --write             accept the present counts (they may only fall)

| kind | texts |
|---|---|
| docstring | docstrings, and strings below an attribute, of all Python files |
| help | `help=` of a parser and the help of a declared setting |
| message | every other string of four words or more in what users run: errors, log lines, notes |
| page | paragraphs and list items of Markdown pages, design notes and the changelog's history left out |
| cell | cells of the tables in these pages |
"""

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.policy.rules import ROOT, dotted, repository_files

ACCEPTED = Path(__file__).with_name("prose.json")
LONG = 30
FRAGMENT = re.compile(
    r"^(?:What|How|Where|When|Whether|Who|Whoever|Whose|Which|That|Those|These|Of|By|As|For|In|On|At|To|With|From|Until"
    r"|After|Before|Since|So|And|Or|But|If|It|Its|Such|Else|None|Nothing|Not)\b(?!-)"
)
IDIOMS = re.compile(
    "|".join(
        [
            r"\b(?:is|are|was) told\b",
            r"\btold (?:of|that|by|where|when)\b",
            r"\bsaid (?:once|so|by name)\b",
            r"\brefused by name\b",
            r"\bwhoever\b",
            r"\bnobody else\b",
            r"(?<!there )\b(?:is|are) no [a-z]+(?: of)?\b",
            r"\bfor (?:it|they|there) (?:is|are|has|have)\b",
            r"\bword table\b",
            r"\bby (?:itself|themselves) alone\b",
            r"\balone has\b",
            r"\bas it (?:is|comes|stands)\b",
            r"\bgo(?:es)? on (?:at|from|with)\b",
            r"\bof ours\b",
            r"\bin silence\b",
            r"\bof a (?:run|step|rank|file|model) (?:that|which|whose)\b",
            r"\bha(?:d|s|ve) to do with\b",
            r"\bthe ways? out\b",
            r"\bwhat (?:was|is|were|are) (?:mended|found|left|given|there|asked)\b",
            r"\bmended\b",
        ]
    ),
    re.IGNORECASE,
)
OPENS = {"docstring", "help"}
"""Kinds of text that must open with a verb or a noun."""


@dataclass(frozen=True)
class Text:
    path: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text[:150]}"


def _joined(node: ast.expr) -> str | None:
    """A literal's text; the values of an f-string stand as one word each."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def _without_code(docstring: str, indentation: int) -> str:
    """Leaves out lines that are indented further than the docstring, which are commands and code."""
    return "\n".join(line for line in docstring.splitlines() if not line.startswith(" " * (indentation + 4)))


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def python_texts(source: str, path: str, messages: bool) -> Iterator[Text]:
    """Docstrings; with `messages` also what the program says."""
    documentation: set[int] = set()
    helps: set[int] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            is_scope = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            for before, statement in zip([None, *body], body, strict=False):
                documents = is_scope if before is None else isinstance(before, (ast.Assign, ast.AnnAssign))
                if documents and isinstance(statement, ast.Expr) and _is_string(statement.value):
                    documentation.add(id(statement.value))
        if isinstance(node, ast.Call):
            named = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
            declared = node.args[1:2] if dotted(node.func).endswith("flag") else []
            helps.update(map(id, [*named, *declared]))
    found, inside = list[Text](), set[int]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or id(node) in inside:
            continue
        text = _joined(node)
        if text is None:
            continue
        inside.update(map(id, ast.walk(node)))
        kind = "docstring" if id(node) in documentation else "help" if id(node) in helps else "message"
        if kind == "docstring" or (messages and len(re.findall(r"[A-Za-z]{2,} ", text)) >= 3):
            prose = _without_code(text, node.col_offset) if kind == "docstring" else text
            found.append(Text(path, node.lineno, kind, " ".join(prose.split())))
    yield from sorted(found, key=lambda text: text.line)


def page_texts(source: str, path: str) -> Iterator[Text]:
    """Paragraphs, items and cells of a Markdown page."""
    code, paragraph, start = False, list[str](), 1
    for number, line in enumerate([*source.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            code, stripped = not code, ""
        item = re.match(r"(?:[-*]|\d+\.) ", stripped)
        if (code or not stripped or item or stripped.startswith(("|", "#", "<"))) and paragraph:
            yield Text(path, start, "page", " ".join(paragraph))
            paragraph = []
        if code or not stripped or stripped.startswith(("#", "<")):
            continue
        if stripped.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", stripped)[1:-1]:
                if re.search(r"[a-z]", cell):
                    yield Text(path, number, "cell", cell.strip())
            continue
        if not paragraph:
            start = number
        paragraph.append(stripped[item.end() :] if item else stripped)


def sentences(text: str) -> list[str]:
    plain = re.sub(r"`[^`]*`|\([^)]*\)|\[([^\]]*)\]", r"\1", text)
    return [sentence for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", plain) if sentence]


def faults(text: Text) -> Iterator[str]:
    """The measures that a text fails: fragment, long, idiom."""
    if text.kind in OPENS and FRAGMENT.match(text.text):
        yield "fragment"
    for sentence in sentences(text.text):
        if len(sentence.split()) > LONG:
            yield "long"
        if IDIOMS.search(sentence):
            yield "idiom"


def all_texts() -> Iterator[Text]:
    for path in repository_files(".py", ".md"):
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            yield from python_texts(source, name, messages=not name.startswith("tests/"))
        elif "design" not in path.parts and name != "CHANGELOG.md":
            yield from page_texts(source, name)


def counts(texts: list[Text]) -> dict[str, int]:
    found = Counter(f"{fault} {text.kind}" for text in texts for fault in faults(text))
    return dict(sorted(found.items()))


def accepted() -> dict[str, int]:
    numbers: dict[str, int] = json.loads(ACCEPTED.read_text(encoding="utf-8"))
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="+", metavar="PATH", help="Prints every place in these files and folders.")
    parser.add_argument("--write", action="store_true", help="Writes the present counts as the accepted ones.")
    given = parser.parse_args()
    texts = list(all_texts())
    if given.list:
        for text in texts:
            if text.path.startswith(tuple(given.list)):
                for fault in faults(text):
                    print(fault, text)
        return
    found = counts(texts)
    if given.write:
        ACCEPTED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    before = accepted()
    for name in sorted({*found, *before}):
        print(f"{name:20} {found.get(name, 0):5}   accepted {before.get(name, 0):5}")


if __name__ == "__main__":
    main()

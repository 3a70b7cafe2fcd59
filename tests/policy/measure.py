"""Measures sizes and names of the package to judge its structure; works on any checkout.

python tests/policy/measure.py [CHECKOUT]         # a table
python tests/policy/measure.py [CHECKOUT] --names # also every public name that is defined twice
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
AROUND = ("compat", "interop", "prove", "report", "cli")  # packages that stand around the core
# What holds a part of a tensor, from its gradient to its bytes on disk; of `distributed` and `checkpoint` not all.
SPINE = ("state", "data_parallel", "optimizer", "parallelize", "checkpoint")
SPINE_FILES = ("distributed/shard.py", "distributed/division.py")  # before `state`
INTEROP = ("checkpoint/hf", "checkpoint/megatron_lm")
CONVENTIONS = ("main", "build_parser", "parser", "register", "calls")  # one in a file, read with its module's name


@dataclass(frozen=True)
class Source:
    path: str  # below megatron/
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def statements(self) -> int:
        return sum(isinstance(node, ast.stmt) for node in ast.walk(self.tree))


def sources(checkout: Path) -> list[Source]:
    package, found = checkout / "megatron", []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path.relative_to(package).as_posix(), text, ast.parse(text)))
    return found


def in_spine(source: Source) -> bool:
    within = source.path.startswith(tuple(f"{folder}/" for folder in SPINE)) or source.path in SPINE_FILES
    return within and not source.path.startswith(tuple(f"{folder}/" for folder in INTEROP))


def in_core(source: Source) -> bool:
    return not source.path.startswith(tuple(f"{folder}/" for folder in AROUND))


def public_names(source: Source) -> Iterator[str]:
    """Functions and classes defined in the module whose names do not begin with an underscore."""
    for node in source.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name


def defined_twice(files: list[Source]) -> dict[str, list[str]]:
    """Names that two or more modules define, with the modules; conventional names are left out."""
    where: dict[str, set[str]] = defaultdict(set)
    for source in files:
        for name in public_names(source):
            where[name].add(source.path)
    return {name: sorted(paths) for name, paths in sorted(where.items()) if len(paths) > 1 and name not in CONVENTIONS}


def comparisons_with(word: str, files: list[Source]) -> int:
    """Comparisons (==, !=, in) with this text on one side."""
    return sum(
        any(
            isinstance(inner, ast.Constant) and inner.value == word for side in _sides(node) for inner in ast.walk(side)
        )
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare)
    )


def _sides(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def longest_function(files: list[Source]) -> tuple[int, str]:
    return max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{source.path}:{node.name}")
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def most_members(files: list[Source]) -> tuple[int, str]:
    """The class with the most public methods and annotated fields."""
    return max(
        (sum(not name.startswith("_") for name in _members(node)), f"{source.path}:{node.name}")
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    )


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield each.name
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def table(files: list[Source]) -> list[tuple[str, str]]:
    spine, core = [each for each in files if in_spine(each)], [each for each in files if in_core(each)]
    rows = [(name, _size(some)) for name, some in (("megatron", files), ("core", core), ("spine", spine))]
    names = {name for source in files for name in public_names(source)}
    twice = defined_twice(files)
    largest = max((source.lines, source.path) for source in files)
    characters = sum(len(source.text) - source.lines for source in files) / sum(source.lines for source in files)
    return [
        *rows,
        ("public names defined twice", f"{len(twice)} of {len(names)}"),
        ('comparisons with "cuda"', str(comparisons_with("cuda", files))),
        ("longest file", f"{largest[0]} lines, {largest[1]}"),
        ("longest function", "{} lines, {}".format(*longest_function(files))),
        ("most public members in the spine", "{}, {}".format(*most_members(spine))),
        ("characters a line", f"{characters:.1f}"),
    ]


def _size(files: list[Source]) -> str:
    lines, statements = (sum(getattr(each, kind) for each in files) for kind in ("lines", "statements"))
    return f"{len(files)} files, {lines} lines, {statements} statements"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--names", action="store_true", help="list the public names that are defined twice")
    arguments = parser.parse_args()
    files = sources(arguments.checkout)
    for name, value in table(files):
        print(f"{name:34} {value}")
    for name, paths in defined_twice(files).items() if arguments.names else ():
        print(f"  {name:24} {', '.join(paths)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

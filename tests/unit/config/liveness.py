"""Finds the settings that the program reads by scanning its source, so that no setting can be accepted and ignored.

A field counts as read in two places: as an attribute of something that holds its section (`config.save`,
`config.checkpoint.save`, a parameter annotated `CheckpointConfig`), or in a string that such code passes to getattr.
Sections' properties and functions of megatron/config count as reading their fields once other code uses them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.run import SECTIONS, all_settings

CLASSES = {cls.__name__: section for section, cls in SECTIONS.items()}
HOLDERS = {"config", "_config", "settings", "section", "args"}


@dataclass
class Reads:
    """Fields, properties and functions that code uses."""

    fields: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def annotated_holders(tree: ast.AST) -> dict[str, str]:
    """Maps names that are annotated with a section class to the section."""
    found = {}
    for node in ast.walk(tree):
        target: str = ""
        annotation: ast.expr | None = None
        if isinstance(node, ast.arg):
            target, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            target, annotation = last_name(node.target), node.annotation
        if annotation is not None:
            words = [last_name(n) for n in ast.walk(annotation) if isinstance(n, ast.Name | ast.Attribute)]
            found.update((target, CLASSES[word]) for word in words if word in CLASSES)
    return found


def reads_of(tree: ast.AST, own_section: str = "", holders: dict[str, str] | None = None) -> Reads:
    """Reads of `tree`; inside a section class, `self` holds that section."""
    holders = annotated_holders(tree) if holders is None else holders
    by_section = {(s.section, s.name) for s in all_settings()}
    all_names = {s.name for s in all_settings()}
    reads = Reads()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            reads.names.add(node.attr)
            base = last_name(node.value)
            section = own_section if base == "self" and own_section else holders.get(base, base.removesuffix("_config"))
            if (section, node.attr) in by_section or (base in HOLDERS | {"run_config"} and node.attr in all_names):
                reads.fields.add(node.attr)
        elif isinstance(node, ast.Name):
            reads.names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in all_names:
            reads.fields.add(node.value)
    return reads


def config_functions(root: Path) -> Iterator[tuple[str, Reads]]:
    """Properties of the sections and functions of megatron/config/batch.py, with the fields that each reads."""
    for path in [*sorted((root / "megatron/config/sections").glob("*.py")), root / "megatron/config/batch.py"]:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            section = CLASSES.get(node.name, "") if isinstance(node, ast.ClassDef) else ""
            for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(inner, ast.FunctionDef):
                    yield inner.name, reads_of(inner, section)


def program_files(root: Path) -> list[Path]:
    """Source files that run, except megatron/config."""
    files = [*sorted((root / "megatron").rglob("*.py")), *sorted((root / "tools").glob("*.py"))]
    files += sorted(root.glob("pretrain_*.py"))
    return [path for path in files if (root / "megatron/config") not in path.parents]


def live_fields(root: Path) -> set[str]:
    """Fields read outside megatron/config, directly or through its properties and functions."""
    fields: set[str] = set()
    names: set[str] = set()
    for path in program_files(root):
        tree = ast.parse(path.read_text())
        without_docstrings(tree)
        reads = reads_of(tree)
        fields |= reads.fields
        names |= reads.names
    functions = list(config_functions(root))
    while True:
        used = [reads for name, reads in functions if name in names]
        grown = names.union(*(reads.names for reads in used))
        fields = fields.union(*(reads.fields for reads in used))
        if grown == names:
            return fields
        names = grown


def without_docstrings(tree: ast.AST) -> None:
    """Removes docstrings: a field that only a docstring mentions is not read."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                item for item in body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
            ]

"""Prints the test files that a change can affect: those that import a changed module, directly or not.

    python tests/changed.py [COMMIT]        # compares the working tree with COMMIT; default: HEAD
    bash tests/run.sh --changed [COMMIT]    # runs them

Lazy imports count. So do names in a test's strings: a script that it starts ("tools/x.py"), a name that it patches.
Other changed files (a page, a recipe, a kernel's source) affect the test files that name them or their folder of csrc/.
A changed page also affects `tests/docs`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megatron", "tests", "benchmarks", "tools", "examples", "csrc")


def changed_files(commit: str) -> list[str]:
    """Files that differ from the commit, new ones included."""
    commands = (["git", "diff", "--name-only", commit], ["git", "ls-files", "--others", "--exclude-standard"])
    found = (subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True).stdout for each in commands)
    return sorted({line for text in found for line in text.splitlines()})


def modules(root: Path, deleted: Iterable[str]) -> dict[str, str]:
    """Maps the dotted name of every module, deleted ones included, to its file."""
    files = [path.relative_to(root) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    files += [path.relative_to(root) for path in sorted(root.glob("*.py"))] + [Path(file) for file in deleted]
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file.as_posix() for file in files}


def imported(module: str, text: str, known: Mapping[str, str]) -> set[str]:
    """Modules of the checkout that a module imports anywhere, and the packages that contain them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if module.startswith("tests."):
                names.update(named(node.value, known))
            elif node.value in known:
                names.add(node.value)  # import_module("...")
    for name in list(names):
        parts = name.split(".")
        names.update(".".join(parts[:count]) for count in range(1, len(parts)))
    return names & known.keys()


def named(text: str, known: Mapping[str, str]) -> set[str]:
    """Scripts and megatron names that a string of a test mentions."""
    files = set(re.findall(r"[\w/]*\w\.py\b", text)) - {"__init__.py"}
    scripts = {module: f"/{file}" for module, file in known.items() if not module.startswith(("megatron.", "tests."))}
    found = {module for module, file in scripts.items() if any(file.endswith(f"/{name.lstrip('/')}") for name in files)}
    return found | set(re.findall(r"\bmegatron(?:\.\w+)+", text))


def affected(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files that a change of these files can affect."""
    changed = set(changed)
    deleted = {file for file in changed if file.endswith(".py") and not (root / file).exists()}
    known = modules(root, deleted)
    texts = {name: (root / file).read_text(encoding="utf-8") for name, file in known.items() if file not in deleted}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        for other in imported(name, text, known):
            importers[other].add(name)
    others = {file for file in changed if not file.endswith(".py")}
    words = {Path(file).name for file in others} | {f"csrc/{file.split('/')[1]}" for file in others if "csrc/" in file}
    reached = {name for name, file in known.items() if file in changed}
    reached |= {
        name for name, text in texts.items() if name.startswith("tests.") and any(word in text for word in words)
    }
    waiting = list(reached)
    while waiting:
        for name in importers[waiting.pop()] - reached:
            reached.add(name)
            waiting.append(name)
    found = {known[name] for name in reached & texts.keys() if Path(known[name]).name.startswith("test_")}
    if any(file.endswith(".md") for file in others):
        found |= {file for file in known.values() if file.startswith("tests/docs/test_")}
    return sorted(found)


def main() -> int:
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    print("\n".join(affected(changed_files(commit))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
